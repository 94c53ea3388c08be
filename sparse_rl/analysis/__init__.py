"""What files say: curves of runs, traces, tables of evaluations. It knows no engine and no trainer.

curves.py      learning and mismatch curves, from metrics.jsonl
traces.py      what traces keep: statistics, tables, density
evaluation.py  the table of an evaluation
drawing.py     how every picture looks
"""
