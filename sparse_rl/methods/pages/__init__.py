"""LuKA's caches: clustered attention, and another policy for each range of layers.

Page p is the tokens [sinks + p n, sinks + (p + 1) n). It closes at c_p = max(P, sinks + (p + 1) n + window), P tokens
being the prompt; from query c_p on its summary stands for it. A query sees sinks, the raw tail and the summaries, and
opens the K pages of largest mass: their raw tokens in the place of their summaries. Prompt queries are dense.

config.py       the settings of both
pages.py        which pages are closed, their summaries, and which of them a query opens
clustered.py    the policy;  cache.py  its cache in the hf engine;  view.py  its replay
layered.py      the policy of policies;  layered_cache.py  its caches;  layered_view.py  their replay
"""
