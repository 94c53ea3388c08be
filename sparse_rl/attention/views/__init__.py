"""Views: objects that a forward pass carries, so that attention can replay a sampler's decisions.

factory.py   make_view: chooses the view that replays all sections of the given traces
replay.py    the view of evictions;  dense.py  the reference view

Cache methods that need another view have it in their own folder (sparse_rl/methods). A view lists in `replays` the
trace sections that it replays, and rejects a trace with any other section.
"""
