"""Analysis of files: curves of runs, statistics of traces, tables of evaluations. Needs no engine and no trainer.

curves.py      curves of any metric, and of the gap between trainer and sampler, against the step, from metrics.jsonl
accuracy.py    accuracy per method, under the small cache and with a full cache
traces.py      statistics, tables and density plots of the tokens that traces keep
opened.py      statistics and a map of the pages that queries of clustered attention opened
sweeps.py      accuracy or perplexity against the budgets of an evaluation, or the ratios of compacted contexts
evaluation.py  the table of an evaluation
drawing.py     style of all pictures, and the colour of each method
"""
