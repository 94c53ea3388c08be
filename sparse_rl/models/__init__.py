"""Models on disk and in memory.

load.py       configuration, tokenizer and weights, each refused in one line where it cannot be used
directory.py  the cache policy and the scorers that a model's directory carries
"""
