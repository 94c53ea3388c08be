"""Training on what a dense teacher says: config.py (no torch); trainer.py and its arguments.py, what distillation and
KVpop's retrofit share; cache.py, what a teacher says, written down once.
"""
