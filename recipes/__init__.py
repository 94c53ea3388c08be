"""The shipped recipes, as package data.

A recipe is found by its folder and name, as in `sparse-rl train quickstart/grpo`. To change one, override keys on the
command line or copy the file. Each file starts with a description, its commands, and the differences from the paper
that it follows. Files without a `kind` (accelerate_configs/) are not recipes.
"""
