"""Attention Matching while a sequence is sampled: what stays carries what went (sparse_rl/matching).

config.py    the settings;  policy.py  the policy;  view.py  its replay
"""
