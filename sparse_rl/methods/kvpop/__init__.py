"""KVpop: beside sinks and window the tokens stay that a model's scorers rank highest.

config.py     the settings;  policy.py  the policy;  learned.py  what it shares with DMS
scorers/      from a layer's keys and values, which tokens will matter
view.py       attention in training, under the mask that scorers induce;  loss.py  their boundary loss

The retrofit is trainer/kvpop; beside GRPO and distillation scorers learn by trainer/scored.
"""
