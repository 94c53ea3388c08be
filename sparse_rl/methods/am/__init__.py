"""Attention Matching during sampling: kept entries stand in for the evicted ones (sparse_rl/matching).

config.py    the settings;  policy.py  the policy;  view.py  the policy's replay;  sections.py  its trace sections
"""
