"""The command line: one file per command, and the only package that imports all others.

main.py       the parser; runs the command that the arguments name
arguments.py  arguments that several commands share: a recipe with its overrides, counts, amounts; shell completion
console.py    output of a command: quiet libraries, one line per training log, one line per error, the exit status
prepared.py   resolves a recipe before a model is loaded; every command that runs a recipe starts from the result
checks.py     resolves a training recipe, and makes all checks of the recipe and its data that need no model
trainers.py   builds the trainer of a prepared recipe, one function per kind
examples.py   reads the training rows of a prepared recipe, and turns them into tokens
sampling.py   builds the engine and prompts of a prepared recipe
resume.py     finds the checkpoint to resume from, and lists the keys that may differ in a resumed run
memory.py     predicts the memory of a run
plan.py       adds up the predicted memory, and compares it with a machine
machine.py    reads the memory of this machine

To add a command, write a file here with ABOUT, `add_arguments(parser)` and `run(options, session)`, which returns the
exit status, and add one entry to _MODULES in main.py. Put heavy imports into `run`, so that a mistyped argument is
reported immediately.
"""
