"""LuKA's caches: clustered attention, and a separate policy for each range of layers.

Page p consists of the tokens [sinks + p n, sinks + (p + 1) n). For a prompt of P tokens, it closes at
c_p = max(P, sinks + (p + 1) n + window); from query c_p on, its summary is read instead of its tokens. A query sees the
sinks, the raw tokens after the closed pages (the tail) and the summaries. It opens the K pages of largest mass, and
reads their raw tokens instead of their summaries. Prompt queries are dense.

config.py       the settings of both
pages.py        closing of pages, their summaries, and the choice of pages that a query opens
clustered.py    the policy;  cache.py  its cache in the hf engine;  view.py  its replay
layered.py      the policy made of policies;  layered_cache.py  its caches;  layered_view.py  their replay
"""
