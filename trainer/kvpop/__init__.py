"""The retrofit of KVpop: settings in config.py (no torch), the trainer in trainer.py, and DMS's trainer in gates.py."""
