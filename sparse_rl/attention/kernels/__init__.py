"""The kernels that compute attention under evict_at; masked.py calls a kernel by its name.

gather        dense calls for chunks of queries, over the keys that any query of a chunk sees (gather.py)
sdpa          SDPA under masks of tokens x tokens, one layer at a time (masked.py, sdpa.py)
flex          FlexAttention over the 128 x 128 tiles that are not empty, keys in natural order (flex.py, tiles.py)
flex_sorted   FlexAttention with keys sorted by evict_at in segments, which leaves fewer tiles
dense         the reference, in float64 (dense.py)
"""
