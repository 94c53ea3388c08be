"""sparse_rl: what an eviction is, independent of engine and trainer.

The core, in reading order:

trace/        the record: one integer per (layer, kv head, token), the first query that no longer attends to it
policies/     which entries a cache keeps, and when;  scorers/  what KVpop's learned policy ranks them by
attention/    a model's forward under a recorded trace (eviction replay);  kernels/  the running top-k
models/       models on disk and in memory;  data/  problems, texts, the quickstart's task

Around it: recipe/, a user's YAML, checked; commands/, the front door (cli.py), which alone imports rollout/, trainer/
and rewards/ (recipe/ knows their configurations); analysis/, what runs and traces say. Below all: errors.py, config.py
(what every configuration is made of), files.py, lazy.py, metrics.py and source.py. The whole house is on one page,
docs/architecture.md.

Shapes throughout: B batch, S sequence, L layer, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head dim,
W window, N entries in a cache, K entries kept; R rows of a call on caches, each a sequence in one layer.
"""

__version__ = "0.1.0"
