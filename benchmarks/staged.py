"""A seed's stages, each a `sparse-rl` process of its own that is run unless what it makes is there."""

from __future__ import annotations

from pathlib import Path

from sparse_rl.commands.quickstart import Stages


class StagedSeed:
    """Of one seed: where its runs lie, and how one is made."""

    def __init__(self, seed: int, stages: Stages, folder: Path) -> None:
        self.seed, self.stages, self.folder = seed, stages, folder / f"seed{seed}"

    def stage(self, label: str, place: Path, command: str, recipe: str, *keys: str) -> None:
        """Train (`command` train) or evaluate (eval) into `place`."""
        if not (place / ("eval.json" if command == "eval" else "model/config.json")).exists():
            more = ["--overwrite"] if command == "eval" else []
            words = [command, recipe, f"output_dir={place}", f"seed={self.seed}", *keys, *more]
            self.stages.run(f"seed {self.seed}: {label}", place, words)
