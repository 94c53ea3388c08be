"""KVpop: keeps sinks, window, and the other tokens that a model's scorers rank highest.

config.py     the settings;  policy.py  the policy;  learned.py  the base class of KVpop's and DMS's policies
scorers/      networks that predict from a layer's keys and values which tokens will matter
view.py       attention in training, under the evictions that the scorers decide;  loss.py  the scorers' boundary loss

The retrofit is in trainer/kvpop; the training of scorers during GRPO and distillation is in trainer/scored.
"""
