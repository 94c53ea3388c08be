"""Layers that hold a state of a fixed size instead of keys and values: gated delta net, Mamba 2, short convolution.

A state follows from the tokens of its sequence alone, so it is computed again in training, and never recorded. This is
exact if no padding and no other sequence enters it, and if sampler and trainer round alike (docs/numerics.md).
"""
