"""The front door: one file per command, and the only place that imports everything.

main.py       the parser, and from words to the command that they name
arguments.py  what several commands take: a recipe with its overrides, counts, amounts; what a shell completes
console.py    what a command shows: quiet libraries, a line per training log, a line per error, the exit status
prepared.py   a recipe resolved, once, before a model is loaded: what every command that runs one starts from
checks.py     the same of a training, with its data, and all else that can be checked before
trainers.py   from there to its trainer, a function per kind;  examples.py  the rows and tokens that it trains on
sampling.py   from there to its engine and its prompts;  resume.py  which keys may differ in a resumed run
memory.py     what a run will take;  sizes.py  the arithmetic;  machine.py  what this machine has

To add a command: a file here with ABOUT, `add_arguments(parser)` and `run(options, session)`, which returns the exit
status, and one line in COMMANDS of main.py. The file imports nothing heavy: `run` does, so that a wrong word is
answered at once.
"""
