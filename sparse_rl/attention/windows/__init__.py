"""Layers with a sliding window, of models such as Gemma 3: the model itself decides which tokens they see.

A query at position q sees the tokens after position q - W. So the window is an eviction with evict_at = t + W, also
inside the prompt. The trace has it beside the evictions of the cache policy, which acts on the other layers alone, the
global layers; its section `windowed` names the windows.

cache.py   WindowedCache, for sampling;  view.py  WindowedView, for training
"""
