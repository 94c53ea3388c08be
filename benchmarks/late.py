"""`sparse-rl train` with an engine in this process that gets each update late: what sampling ahead does to learning.

python benchmarks/late.py UPDATES train RECIPE KEY=VALUE ...      # see one_step_ahead in training.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from sparse_rl.cli import main
from tests.late import LateEngine
from trainer import sampler


def be_late(updates: int) -> None:
    """Let trainings sample with a copy of the model whose weights are this number of updates old."""
    make = sampler.make_engine

    def make_late(kind: Any, *, model: Any, **options: Any) -> Any:
        return LateEngine(make(kind, model=model.config._name_or_path, **options), updates)

    sampler.make_engine = make_late


if __name__ == "__main__":
    be_late(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
