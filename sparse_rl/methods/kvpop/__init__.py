"""KVpop: keeps sinks, window, and the other tokens that a model's scorers rank highest.

The retrofit is in trainer/kvpop; the training of scorers during GRPO and distillation is in trainer/scored.
"""
