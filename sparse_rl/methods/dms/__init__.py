"""DMS (dynamic memory sparsification): a gate decides for each arriving token whether it will be dropped.

config.py    the settings;  policy.py  the policy
cache.py     the cache, whose kv heads hold different numbers of entries
view.py      attention in training, under soft gates
"""
