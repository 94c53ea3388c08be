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
    """Keep imports from finding the user's own files, such as `rewards/` or `trainer.py`, in the working directory.

    `python -m` and empty entries of PYTHONPATH put the working directory first on sys.path. The directory is moved to
    the end if PYTHONPATH names it, and is removed otherwise.
    """
    here = Path.cwd()
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if here == SOURCES:  # perhaps not installed, but child processes must find it too
        os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *entries])
        return
    is_named = here in (Path(entry).resolve() for entry in entries)
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here] + [str(here)] * is_named


if __name__ == "__main__":
    sys.exit(main())
