"""Training of models with the scorers of a learned policy: config.py (no torch), loss.py and trainer.py."""
