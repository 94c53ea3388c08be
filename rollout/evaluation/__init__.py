"""rollout.evaluation: pass@k over tasks and cache policies, and the perplexity of a text under them, on an engine.

evaluate.py    every task under every policy: one row each
contexts.py    every task after contexts that are compacted once, under every compaction: one row each
perplexity.py  a text, cut into pieces, under every policy: one row each
samples.py     sampling any number of prompts, in parts that fit
entries.py     numbers of entries that are held and read
estimators.py  pass@k and standard errors

Callers pass prompts and pieces as token ids, a scoring function, policies, and a function that opens an engine. The
package does not depend on recipes, rewards or tokenizers, and draws no plots.
"""
