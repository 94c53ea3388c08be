"""Policies that evict on a schedule, by a score of each entry.

config.py          settings of these policies
cache.py           the cache of these policies in the hf engine; its buffers really shrink
full.py            no eviction
streaming.py       sinks and the most recent tokens (StreamingLLM)
h2o.py, lined.py   accumulated attention (H2O); the same score with a budget that is a fraction of the tokens (LuKA)
tova.py            the last query's attention (TOVA)
scored_window.py   the last queries' attention: SnapKV, MorphKV, R-KV, G-KV, CAKE
"""
