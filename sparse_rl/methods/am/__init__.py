"""Attention Matching (AM, "Fast KV compaction via attention matching"): a few entries replace a whole block.

A block is the set of entries of a kv head that a compaction may evict. The compaction keeps some of them, and gives
each kept entry a bias that preserves attention mass and a new value that preserves attention output. Engines and
trainer share this tensor code; only the trainer needs gradients. tests/matching_reference.py has slow references.
"""
