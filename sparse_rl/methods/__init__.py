"""The cache methods, a folder each: settings, policy, cache, replay and whatever else is theirs alone.

eviction/    evictions on a schedule: streaming, H2O, TOVA, SnapKV, MorphKV, R-KV, G-KV, CAKE, lined attention
kvpop/       KVpop: evictions by scorers that a model has learned
dms/         DMS: evictions by gates that a model has learned
am/          Attention Matching: what stays gets biases and other values
pages/       LuKA: clustered attention, and another policy for each range of layers

What all methods share is in sparse_rl/policies (the contract, the schedule, the cache), sparse_rl/trace and
sparse_rl/attention. The settings class of a method names its parts (sparse_rl/policies/config.py), and one line of
CONFIGS (sparse_rl/methods/config.py) registers it. docs/extending.md says how to add one.
"""
