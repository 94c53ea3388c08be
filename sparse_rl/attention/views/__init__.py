"""Views: objects that a forward pass carries, so that attention can replay a sampler's decisions.

Cache methods that need a view of their own have it in their own folder (sparse_rl/methods).
"""
