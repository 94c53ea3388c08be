"""DMS (dynamic memory sparsification): a gate decides for each arriving token if it will be dropped.

config.py    the settings;  policy.py  the policy;  cache.py  its cache, with different counts in kv heads
view.py      attention in training, under soft gates
"""
