"""Distillation under recorded evictions: config.py, what it is told (no torch); trainer.py."""
