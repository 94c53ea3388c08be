"""Attention Matching under its public name; the code is in sparse_rl/methods/am."""

from sparse_rl.methods.am.match import Block, Fit, choose, match, refit, residuals
from sparse_rl.methods.am.sections import ContextRecord, Record

__all__ = ["Block", "ContextRecord", "Fit", "Record", "choose", "match", "refit", "residuals"]
