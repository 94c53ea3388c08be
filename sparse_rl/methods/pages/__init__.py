"""LuKA's caches: clustered attention, and a separate policy for each range of layers.

Clustered attention divides the tokens after the sinks into pages of n tokens: page p consists of the tokens
[sinks + p n, sinks + (p + 1) n). For a prompt of P tokens, page p closes at c_p = max(P, sinks + (p + 1) n + window);
from query c_p on, the page's summary is read instead of its tokens. A query sees the sinks, the raw tokens after the
closed pages (the tail) and the summaries. The query opens the K pages with the largest attention mass: it reads the raw
tokens of these pages instead of their summaries. Prompt queries are dense.

config.py       settings of clustered attention and of the policy with ranges of layers
pages.py        the division into pages, their summaries, and the choice of pages that a query opens
sections.py     trace sections of clustered attention
clustered.py    the policy of clustered attention;  cache.py  its cache in the hf engine;  view.py  its replay
layered.py      the policy with ranges of layers;  layered_cache.py  its caches;  layered_view.py  its replay
"""
