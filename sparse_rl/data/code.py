"""Instructions for problems that a program solves."""

from __future__ import annotations

from typing import Any

from sparse_rl.errors import UserError

STARTED = "Complete this Python code so that it solves the problem:\n\n```python\n{code}\n```"
FROM_INPUT = "Write a Python program that reads the input from standard input and prints the answer to standard output."
FENCED = "Put the whole program into one block at the end of your answer, between ```python and ```."


def with_instruction(problem: Any, starter_code: Any) -> str:
    """Return the problem, followed by an instruction to write a program.

    starter_code : code from which the program starts; if it is None or empty, the program reads standard input

    Raises UserError if the problem or the code is not text.
    """
    if not isinstance(problem, str):
        raise UserError(f"a problem with starter code must be text, got {type(problem).__name__}")
    if starter_code is not None and not isinstance(starter_code, str):
        raise UserError(f"starter code must be text, got {type(starter_code).__name__}")
    code = (starter_code or "").rstrip()
    task = STARTED.replace("{code}", code) if code.strip() else FROM_INPUT
    return f"{problem.rstrip()}\n\n{task}\n\n{FENCED}"
