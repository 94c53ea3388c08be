"""Attention Matching during sampling: kept entries get biases and new values (sparse_rl/matching)."""
