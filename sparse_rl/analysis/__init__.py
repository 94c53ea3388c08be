"""Analysis of files: curves of runs, statistics of traces, tables of evaluations. Needs no engine and no trainer.

curves.py      curves of any metric and of the mismatch against the step, from metrics.jsonl
accuracy.py    accuracy per method, under the small cache and with a full cache
traces.py      tokens that traces keep: statistics, tables, density
opened.py      pages that queries of clustered attention opened: statistics, and a map
sweeps.py      accuracy or perplexity against the budgets of an evaluation, or the ratios of compacted contexts
evaluation.py  the table of an evaluation
drawing.py     style of all pictures, and the colour of each method
"""
