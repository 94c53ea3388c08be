"""The loss of training with a teacher: the settings are in config.py (no torch), the loss in distillation.py."""
