"""Training with a dense teacher, which attends to all tokens.

config.py   settings (no torch);  trainer.py  base trainer of distillation and KVpop's retrofit
cache.py    a teacher's log-probs on disk
"""
