"""Layers with a sliding window, of models such as Gemma 3: the model itself decides which tokens they see.

A query at position q sees the tokens from q - W + 1 to q. So the window is an eviction with evict_at = t + W, also
inside the prompt. The trace has it beside the evictions of the cache policy, which acts on the other layers alone, the
global layers. The trace's section `windowed` has the window of each layer, 0 for a global layer.

cache.py   WindowedCache, for sampling;  view.py  WindowedView, for training
"""
