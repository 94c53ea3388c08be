"""What is minimised against a teacher: config.py (no torch); distillation.py."""
