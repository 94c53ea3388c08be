"""Models on disk and in memory.

load.py       configuration, tokenizer and weights, each refused in one line where it cannot be used
weights.py    whether a directory holds weights that can be loaded, by the headers of its files
hub.py        whether a model that is named on a hub can be had
directory.py  the cache policy and the scorers that a model's directory carries
"""
