"""Attention Matching (AM, "Fast KV compaction via attention matching"): fit a few entries to the output of a block.

A compaction keeps some of a block's keys, gives each key a bias to match the block's attention mass, and refits the
values to match the block's output. This is pure tensor code over rows and kv heads. Engines and the trainer call the
same functions; only the trainer needs gradients.

select.py      choice of the keys: by the attention that they receive, or by orthogonal matching pursuit of the mass
fit.py         fit of the biases and values
block.py       a compaction: `match` chooses entries and fits them, `refit` fits given entries
record.py      a trace's record of compactions
reference.py   the same computations for one head and one entry at a time: plain and slow, to compare with
"""

from sparse_rl.matching.block import Block, Fit, match, refit, residuals
from sparse_rl.matching.record import Record

__all__ = ["Block", "Fit", "Record", "match", "refit", "residuals"]
