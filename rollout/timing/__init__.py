"""Times sampling and the compaction of contexts, for `sparse-rl bench`.

sampling.py   sampling to several lengths, with the parts of a step, and the memory
contexts.py   stages of the compaction of a context
estimate.py   about how long sampling and compaction will take on this machine
"""
