"""Computations with an optimised kernel, each with a plain reference that the kernel is compared with."""

from sparse_rl.kernels.redundancy import mean_similarity
from sparse_rl.kernels.topk import RunningTopK, recall, running_topk
from sparse_rl.kernels.topk_reference import running_topk_reference

__all__ = ["RunningTopK", "mean_similarity", "recall", "running_topk", "running_topk_reference"]
