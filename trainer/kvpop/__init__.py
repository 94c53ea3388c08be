"""KVpop's retrofit: config.py, what it is told (no torch); trainer.py; gates.py, that of DMS."""
