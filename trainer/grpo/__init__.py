"""RL under a sparse cache.

config.py      what it is told (no torch);  arguments.py  TRL's arguments made of that
trainer.py     TRL's GRPOTrainer with our rollouts;  rows.py  what goes with a row from sampling to the loss
forward.py     log-probs under the traces;  advantages.py  groups without variance, truncated outputs
probe.py       the engine with the trainer's weights, probed;  panel.py  sampler against trainer: metrics and guard
measures.py    what is measured over all processes;  clock.py  where the seconds of a step go
table.py       TRL's table of completions
"""
