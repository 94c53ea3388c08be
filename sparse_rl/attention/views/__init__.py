"""What a forward carries so that attention can replay what a sampler did.

factory.py   make_view: the view that replays all sections of some traces
replay.py    evictions;  dense.py  their reference

The views of other methods are in their folders (sparse_rl/methods). A view says in `replays` which sections of a trace
it replays, and refuses any other.
"""
