"""Distillation under recorded evictions: the settings are in config.py (no torch), the trainer in trainer.py."""
