"""What files say: curves of runs, traces, tables of evaluations. It knows no engine and no trainer.

curves.py      any metric against the step, and mismatch curves, from metrics.jsonl
accuracy.py    accuracy per method, under the small cache and with a full one
traces.py      what traces keep: statistics, tables, density
opened.py      which pages queries of clustered attention opened: statistics, and a map
sweeps.py      accuracy, or perplexity, against the budgets of an evaluation, or ratios of compacted contexts
evaluation.py  the table of an evaluation
drawing.py     how every picture looks, and the colour of each method
"""
