"""Supervised fine-tuning: config.py, what it is told (no torch); trainer.py."""
