"""The loss against a teacher: its settings (config.py, no torch) and its computation (distillation.py)."""
