"""LuKA's caches: clustered attention, and a separate policy for each range of layers (layered*.py).

Clustered attention divides the tokens after the sinks into pages of n tokens: page p consists of the tokens
[sinks + p n, sinks + (p + 1) n). For a prompt of P tokens, page p closes at c_p = max(P, sinks + (p + 1) n + window);
from query c_p on, the page's summary is read instead of its tokens. A query sees the sinks, the raw tokens after the
closed pages (the tail) and the summaries. The query opens the K pages with the largest attention mass: it reads the raw
tokens of these pages instead of their summaries. Prompt queries are dense.
"""
