"""RL under a sparse cache.

config.py      settings (no torch);  arguments.py  TRL's arguments, made from the settings
trainer.py     TRL's GRPOTrainer with our rollouts;  rows.py  data that stays with a row from sampling to the loss
forward.py     log-probs under the traces;  advantages.py  groups without variance, truncated outputs
probe.py       weight sync and probe of the engine;  panel.py  metrics and guard of the sampler-trainer mismatch
measures.py    metrics over all processes;  clock.py  timing of the parts of a step
table.py       TRL's table of completions
"""
