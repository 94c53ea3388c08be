"""KVpop: beside sinks and window the tokens stay that a model's scorers rank highest.

config.py     the settings;  policy.py  the policy;  learned.py  what it shares with DMS
scorers/      from a layer's keys and values, which tokens will matter
view.py       attention in training, under the mask that scorers induce

The retrofit, and its loss, are in trainer/kvpop and trainer/losses.
"""
