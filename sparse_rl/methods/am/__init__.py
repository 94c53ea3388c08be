"""Attention Matching during sampling: kept entries stand in for the evicted ones (sparse_rl/matching).

config.py    the settings;  policy.py  the policy;  view.py  its replay;  sections.py  its records in a trace
"""
