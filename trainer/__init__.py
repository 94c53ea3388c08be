"""Training under recorded evictions. The trainers take values, never recipes.

docs/internals.md lists every part of TRL and transformers that this package overrides or reads.
"""
