"""Models on disk and in memory.

load.py       loads configuration, tokenizer and weights; an unusable file gives a one-line error
weights.py    checks from the file headers that a directory's weights can be loaded
hub.py        checks that a hub model is available
known.py      the shapes of the hub models that the shipped recipes name
directory.py  the cache policy and the scorers saved in a model's directory
"""
