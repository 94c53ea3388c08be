"""sparse_rl: evictions from a KV cache, defined independently of engine and trainer.

The core, in reading order:

trace/        the record: one integer per (layer, kv head, token), the first query that no longer attends to it
policies/     choose the entries that a cache keeps, and the time of each eviction
scorers/      score entries for KVpop's learned policy
attention/    a model's forward pass under a recorded trace (eviction replay);  kernels/  the running top-k
models/       models on disk and in memory;  data/  problems, texts, the quickstart's task

Around the core: recipe/ reads and checks a user's YAML; commands/ holds the commands behind cli.py, and is the only
package here that imports rollout/, trainer/ and rewards/ (recipe/ imports only their configurations); analysis/
evaluates runs and traces. All of these use errors.py, config.py (the base of every configuration), files.py, lazy.py,
metrics.py and source.py. docs/architecture.md describes the whole project on one page.

Shapes throughout: B batch, S sequence, L layer, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head dim,
W window, N entries in a cache, K entries kept; R rows of a call on caches, each a sequence in one layer.
"""

__version__ = "0.1.0"
