"""The cache methods, one folder each: settings, policy, cache, replay and other code of the method.

eviction/    evictions on a schedule: streaming, H2O, TOVA, SnapKV, MorphKV, R-KV, G-KV, CAKE, lined attention
kvpop/       KVpop: evictions by scorers that a model has learned
dms/         DMS: evictions by gates that a model has learned
am/          Attention Matching: kept entries get biases and new values
pages/       LuKA: clustered attention, and a separate policy for each range of layers

Code that all methods share is in sparse_rl/policies (contract, schedule, cache), sparse_rl/trace and
sparse_rl/attention. docs/extending.md describes how to add a method.
"""
