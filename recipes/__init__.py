"""recipes: the shipped recipes, as package data.

A recipe is found by its folder and name, `sparse-rl train quickstart/grpo`; to change one, override keys on the command
line or copy the file. Each opens with what it is, the commands, and where it departs from the paper that it restates.
Files without a `kind` (accelerate_configs/) are no recipes.
"""
