"""What a forward carries so that attention can replay what a sampler did: one view per kind of cache.

factory.py   make_view: the view that replays all sections of some traces
replay.py    evictions;  dense.py  their reference
learned.py   evictions that are not recorded but decided in the forward, by scorers that are being trained
gated.py     the same by DMS's gates

A view says in `replays` which sections of a trace it replays, and refuses any other. Adding one is a file here with
that class attribute and `attend`, and an entry of VIEWS.
"""
