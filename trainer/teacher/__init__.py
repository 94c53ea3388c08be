"""Training on what a dense teacher says: config.py (no torch); trainer.py, shared by distillation and KVpop's retrofit;
cache.py, what a teacher says, written down once.
"""
