"""Supervised fine-tuning: its settings (config.py, no torch) and its trainer (trainer.py)."""
