"""RL under a sparse cache.

config.py      what it is told (no torch);  arguments.py  TRL's arguments made of that
trainer.py     TRL's GRPOTrainer with our rollouts, under their traces
probe.py       the engine with the trainer's weights, probed;  panel.py  sampler against trainer: metrics and guard
advantages.py  groups without variance, truncated outputs;  clock.py  where the seconds of a step go
given.py       what a caller gives that cannot be trained with;  table.py  TRL's table of completions
reference.py   the weights of a reference model that follows the policy, in checkpoints
"""
