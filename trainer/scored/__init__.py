"""Trainings whose model carries the scorers of a learned policy: config.py (no torch); loss.py; trainer.py."""
