"""sparse_rl: what an eviction is, independent of engine and trainer.

trace.py      one integer per (layer, kv head, token): the first query that no longer attends to it
policies/     which entries a cache keeps (one file per family)
attention/    training attention under a recorded trace (eviction replay)
recipe.py     YAML -> typed, validated recipes;  data.py  prompts and answers;  engines.py  which engine samples
cli.py        the front door; it and what only it uses (checks, evaluate, quickstart, samples) are the only places that
              import rollout/, trainer/ and rewards/

Shapes throughout: B batch, S sequence, L layer, Hq query heads, Hkv kv heads, G = Hq / Hkv, D head dim,
W window, N entries in a cache, K entries kept.
"""

__version__ = "0.1.0"
