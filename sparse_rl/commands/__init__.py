"""The command line: one file per command, and the only package that imports all others.

main.py       the parser; runs the command that the arguments name
arguments.py  arguments that several commands share: a recipe with its overrides, counts, amounts; shell completion
console.py    output of a command: quiet libraries, one line per training log, one line per error, the exit status
prepared.py   resolves a recipe once, before a model is loaded; every command that runs a recipe starts from it
checks.py     the same for a training run, with its data and everything else that can be checked in advance
trainers.py   builds the trainer of a prepared recipe, one function per kind;  examples.py  its training rows and tokens
sampling.py   builds the engine and prompts of a prepared recipe;  resume.py  keys that may differ in a resumed run
memory.py     predicts the memory of a run;  machine.py  the memory of this machine

To add a command: a file here with ABOUT, `add_arguments(parser)` and `run(options, session)`, which returns the exit
status, and one entry in _MODULES of main.py. Heavy imports belong into `run`, so that a mistyped argument is reported
at once.
"""
