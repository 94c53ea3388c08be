"""KVpop's retrofit: its settings (config.py, no torch) and trainer (trainer.py), and the trainer of DMS (gates.py)."""
