"""Models on disk and in memory.

load.py loads configuration, tokenizer and weights. weights.py and hub.py check that weights or a hub model can be
loaded. known.py has the shapes of the hub models that the shipped recipes name. directory.py reads and writes the cache
policy and the scorers in a model's directory.
"""
