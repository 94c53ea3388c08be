"""sparse_rl: evictions from a KV cache, defined independently of any engine or trainer.

docs/architecture.md lists the packages, and which packages each may import. Only commands/ imports rollout/, trainer/
and rewards/ freely; recipe/ imports only their configurations.

Symbols in shapes: B sequences in a batch, S tokens in a sequence, L layers, Hq query heads, Hkv kv heads, G = Hq / Hkv
query heads per kv head, D head dim, W tokens in a window, N entries in a cache, K entries kept, and R rows, where a row
is the cache of one sequence in one layer.
"""

__version__ = "0.1.0"
