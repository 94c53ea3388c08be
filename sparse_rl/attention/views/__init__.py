"""Views: objects that a forward pass carries, so that attention can replay a sampler's decisions.

A cache method that needs another view has this view in its own folder in sparse_rl/methods.
"""
