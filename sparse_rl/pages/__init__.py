"""Clustered attention (LuKA, section 3.2): closed pages are read as their summaries, and a few of them token by token.

Page p is the tokens [sinks + p n, sinks + (p + 1) n). It closes at c_p = max(P, sinks + (p + 1) n + window), P tokens
being the prompt; from query c_p on its summary stands for it. A query sees sinks, the raw tail and the summaries, and
opens the K pages of largest mass: their raw tokens in the place of their summaries. Prompt queries are dense.

Pure tensor code over rows and kv heads, which engine and trainer share.

pages.py      the settings; which pages are closed
summary.py    their summaries; which of them a query opens
"""

from sparse_rl.pages.pages import Pages
from sparse_rl.pages.summary import attention_weights, choose, random_weights, summarise

__all__ = ["Pages", "attention_weights", "choose", "random_weights", "summarise"]
