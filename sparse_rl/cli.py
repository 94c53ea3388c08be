"""Entry point of `sparse-rl` and `python -m sparse_rl.cli`. The commands are in sparse_rl/commands/."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]  # the folder that holds our packages


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        leave_out_working_directory()
    except OSError as error:  # the directory was deleted, or is not readable
        reason = error.strerror or str(error)
        print(f"sparse-rl: error: the working directory cannot be used ({reason}); change to another", file=sys.stderr)
        return 2
    from sparse_rl.commands.main import main as run

    return run(arguments)


def leave_out_working_directory() -> None:
    """Make sure that no import finds a file of the user in the working directory, such as `trainer.py` or `rewards/`.

    `python -m` and empty entries of PYTHONPATH put the working directory first on sys.path. This function
    moves it to the end if PYTHONPATH names it, and removes it otherwise.
    """
    here = Path.cwd()
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if here == SOURCES:  # sparse_rl may not be installed, and child processes must find it too
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *entries])
        return
    is_named = here in (Path(entry).resolve() for entry in entries)
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here] + [str(here)] * is_named


if __name__ == "__main__":
    sys.exit(main())
