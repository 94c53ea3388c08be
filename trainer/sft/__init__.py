"""Supervised fine-tuning: the settings are in config.py (no torch), the trainer in trainer.py."""
