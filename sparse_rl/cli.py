"""The door: `sparse-rl` and `python -m sparse_rl.cli`. Behind it are the commands, sparse_rl/commands/."""

import sys

from sparse_rl.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
