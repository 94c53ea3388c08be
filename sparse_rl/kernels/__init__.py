"""Computations that have an optimised kernel. For each, tests compare the kernel with a plain reference."""

from sparse_rl.kernels.redundancy import mean_similarity
from sparse_rl.kernels.topk import RunningTopK, recall, running_topk

__all__ = ["RunningTopK", "mean_similarity", "recall", "running_topk"]
