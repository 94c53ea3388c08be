"""sparse_rl: evictions from a KV cache, defined independently of engine and trainer.

The core, in reading order:

trace/        the record of evictions: for each (layer, kv head, token), the first query that no longer attends to the
              token, as one integer
policies/     choose the entries that a cache keeps, and the time of each eviction
scorers/      score entries for KVpop's learned policy
attention/    a model's forward pass under a recorded trace (eviction replay);  kernels/  the running top-k
models/       models on disk and in memory;  data/  problems, texts, the quickstart's task

Around the core: recipe/ reads and checks a user's YAML; commands/ holds the commands that cli.py runs, and is the only
package here that imports rollout/, trainer/ and rewards/ (recipe/ imports only the configurations of these three);
analysis/ evaluates runs and traces. All packages use errors.py, config.py (the base of every configuration), files.py,
lazy.py, metrics.py and source.py. docs/architecture.md describes the whole project on one page.

Symbols in shapes: B sequences in a batch, S tokens in a sequence, L layers, Hq query heads, Hkv kv heads,
G = Hq / Hkv query heads per kv head, D head dim, W tokens in a window, N entries in a cache, K entries kept, and R rows
of a call on caches, where a row is one sequence in one layer.
"""

__version__ = "0.1.0"
