"""Analysis of files: metrics.jsonl (curves.py), traces (traces.py, opened.py), evaluations (evaluation.py, sweeps.py).

accuracy.py draws accuracies of methods, and drawing.py has the style of all pictures. No engine or trainer is needed.
"""
