"""What is minimised: config.py (no torch); distillation.py, against a teacher; boundary.py, against the future."""
