"""Distillation under recorded evictions: its settings (config.py, no torch) and its trainer (trainer.py)."""
