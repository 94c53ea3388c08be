"""Attention Matching (AM, "Fast KV compaction via attention matching"): fit a few entries to the output of a block.

A compaction keeps some of a block's entries, gives each key a bias so that the kept entries match the block's attention
mass, and fits new values so that they match the block's output. The package is pure tensor code over rows and kv heads.
Engines and the trainer call the same functions; only the trainer needs gradients.

select.py      choice of the keys: by the attention that they receive, or by orthogonal matching pursuit of the mass
fit.py         fit of the biases and values
block.py       a compaction: `match` chooses entries and fits them, `refit` fits given entries
record.py      a trace's record of compactions
reference.py   reference implementations for one head and one entry at a time, plain and slow, for tests
"""

from sparse_rl.matching.block import Block, Fit, match, refit, residuals
from sparse_rl.matching.record import Record

__all__ = ["Block", "Fit", "Record", "match", "refit", "residuals"]
