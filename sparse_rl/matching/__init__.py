"""Attention Matching (AM, "Fast KV compaction via attention matching"): fewer entries that say what more of them said.

A compaction keeps some of a block's keys, gives each a bias, so that the attention mass is right, and refits their
values, so that the output is right. Pure tensor code over rows and kv heads: engines and the trainer call the same
functions, engines without gradients, the trainer with them.

select.py      which keys: by the attention that they receive, or orthogonal matching pursuit of the mass
fit.py         their biases and values
block.py       a compaction: `match` chooses and fits, `refit` fits what was chosen
record.py      what a trace says of compactions
reference.py   the same, one head and one entry at a time: plain, slow, and what the others are compared with
"""

from sparse_rl.matching.block import Block, Fit, match, refit, residuals
from sparse_rl.matching.record import Record

__all__ = ["Block", "Fit", "Record", "match", "refit", "residuals"]
