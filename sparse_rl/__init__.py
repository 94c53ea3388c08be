"""sparse_rl: evictions from a KV cache, defined independently of engine and trainer.

docs/architecture.md lists the packages and the imports that each may have. Only commands/ imports rollout/, trainer/
and rewards/; recipe/ imports the configurations of these three.

Symbols in shapes: B sequences in a batch, S tokens in a sequence, L layers, Hq query heads, Hkv kv heads, G = Hq / Hkv
query heads per kv head, D head dim, W tokens in a window, N entries in a cache, K entries kept, and R rows of a call on
caches, where a row is one sequence in one layer.
"""

__version__ = "0.1.0"
