"""The door: `sparse-rl` and `python -m sparse_rl.cli`. Behind it are the commands, sparse_rl/commands/."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]  # the folder that holds our packages


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        leave_out_working_directory()
    except OSError as error:  # it was deleted, or may not be looked at
        reason = error.strerror or str(error)
        print(f"sparse-rl: error: the working directory cannot be used ({reason}); change to another", file=sys.stderr)
        return 2
    from sparse_rl.commands.main import main as run

    return run(arguments)


def leave_out_working_directory() -> None:
    """Import nothing from the working directory, where a folder `rewards/` or a file `trainer.py` is the user's.

    `python -m` looks there first, and so does an empty entry of PYTHONPATH. Where an entry names it, it comes last.
    """
    here = Path.cwd()
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if here == SOURCES:  # our own, perhaps not installed: the processes that a command starts must find them too
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *named])
        return
    asked_for = here in (Path(entry).resolve() for entry in named)
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here] + [str(here)] * asked_for


if __name__ == "__main__":
    sys.exit(main())
