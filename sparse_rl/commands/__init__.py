"""The command line: one file per command, and the only package that imports all others.

A command is a module with ABOUT, `add_arguments(parser)` and `run(options, session)`, which returns the exit status,
and an entry in _MODULES in main.py. It imports heavy libraries in `run`, so that a mistyped argument is told at once.
"""
