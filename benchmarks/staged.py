"""The stages of a benchmark for one seed. A stage is a `sparse-rl` process, and is skipped if its result exists."""

from __future__ import annotations

from pathlib import Path

from sparse_rl.commands.quickstart import Stages


class StagedSeed:
    """The folder of one seed's runs, and the function that runs a stage."""

    def __init__(self, seed: int, stages: Stages, folder: Path) -> None:
        self.seed, self.stages, self.folder = seed, stages, folder / f"seed{seed}"

    def stage(self, label: str, place: Path, command: str, recipe: str, *keys: str) -> None:
        """Run `sparse-rl train` or `sparse-rl eval` (`command`) with the output directory `place`."""
        if not (place / ("eval.json" if command == "eval" else "model/config.json")).exists():
            overwrite = ["--overwrite"] if command == "eval" else []
            words = [command, recipe, f"output_dir={place}", f"seed={self.seed}", *keys, *overwrite]
            self.stages.run(f"seed {self.seed}: {label}", place, words)
