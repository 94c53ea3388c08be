"""DMS (dynamic memory sparsification): a gate says of each token, as it comes, whether it goes.

config.py    the settings;  policy.py  the policy;  cache.py  kv heads that hold different numbers of entries
view.py      attention in training, under soft gates
"""
