"""Training under recorded evictions. The trainers take values; sparse_rl/commands/trainers.py reads the recipes.

Each kind of training has a folder with config.py (its settings, without torch) and trainer.py: grpo/, distill/, kvpop/,
sft/. distill/ and kvpop/ share teacher/ and losses/. scored/ trains a learned policy's scorers in any training.

Every trainer is a subclass of Resumable (resumable.py), whose runs resume exactly. docs/internals.md lists every part
of TRL and transformers that this package overrides or reads.
"""
