"""The cache methods that do more than evict by a score, one folder each: settings, policy, cache, replay and so on.

kvpop/       KVpop: evictions by scorers that a model has learned; DMS: evictions by gates that it has learned
am/          Attention Matching: kept entries get biases and new values
pages/       LuKA: clustered attention, and a separate policy for each range of layers
press/       presses of the library kvpress

Policies that only evict by a score, and the code that all methods share, are in sparse_rl/policies.
docs/extending.md describes how to add a method.
"""
