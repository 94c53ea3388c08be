"""rollout.evaluation measures pass@k of tasks, and the perplexity of a text, under each of several cache policies.

evaluate.py    evaluates tasks under policies: one row of results per task and policy
contexts.py    evaluates tasks after compacted contexts: one row per task and compaction
references.py  scores the full cache's answers after each compaction of their context: log-perplexity
budgets.py     measures head budgets: the loss after compactions in which one kv head at a time is varied
perplexity.py  measures the perplexity of a text, cut into pieces: one row per policy
samples.py     samples any number of prompts, in parts, so that not all traces are in memory together
journal.py     file of finished completions, which several processes share and which survives kills
entries.py     counts the cache entries that kv heads hold and that queries read
estimators.py  pass@k and standard errors

Callers pass prompts and pieces as token ids, a scoring function, policies, and a function that opens an engine. The
package does not depend on recipes, rewards or tokenizers, and draws no plots.
"""
