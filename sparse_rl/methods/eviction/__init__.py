"""Policies that evict on a schedule, by a score of each entry.

config.py          their settings
cache.py           their cache in the hf engine, which shrinks
full.py            nothing goes
streaming.py       sinks and the most recent tokens (StreamingLLM)
h2o.py, lined.py   accumulated attention (H2O); a fraction of the tokens by it (LuKA)
tova.py            the last query's attention (TOVA)
scored_window.py   the last queries' attention: SnapKV, MorphKV, R-KV, G-KV, CAKE
"""
