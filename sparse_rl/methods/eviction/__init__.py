"""Policies that evict on a schedule, by a score of each entry.

cache.py holds the hf engine's cache. full.py, streaming.py (StreamingLLM), h2o.py, lined.py (H2O's score, budget as a
fraction of the tokens), tova.py and scored_window.py (SnapKV, MorphKV, R-KV, G-KV, CAKE) hold the policies.
"""
