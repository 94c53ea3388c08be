"""What computes attention under evict_at, one file per kernel; masked.py calls the one that is asked for.

gather        dense calls of some queries over the keys that any of them sees (gather.py)
sdpa          S x S masks of one layer at a time (masked.py, sdpa.py)
flex          FlexAttention over 128 x 128 tiles that hold something, keys in natural order (flex.py, tiles.py)
flex_sorted   the same with keys sorted by evict_at in segments: fewer tiles
dense         the reference, in float64 (dense.py)

Beside them, for KVpop's target: transposed.py, what flows into a key, by FlexAttention.
"""
