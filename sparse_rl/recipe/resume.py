"""The fingerprints of a recipe's inputs: a resumed run must have the same as the run that it continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rewards import REWARDS
from rewards.own import source_files
from sparse_rl.files import fingerprint
from sparse_rl.models.weights import file_fingerprints
from trainer.checkpoint import rows_fingerprint


def input_fingerprints(
    datasets: Mapping[str, Any], files: Mapping[str, tuple[str | None, bool]], rewards: Iterable[Any]
) -> dict[str, str]:
    """Return the fingerprints, by name, of all rows and files that a recipe gives by path or name.

    datasets : dotted key -> rows; None for a dataset that the recipe does not have
    files : key -> (directory, file or hub name; None for none, True if its weights are read)
    """
    inputs = {f"rows of {key}": rows_fingerprint(rows) for key, rows in datasets.items() if rows is not None}
    for key, (place, weights) in files.items():
        if place is not None:
            digests = file_fingerprints(place, weights)
            inputs |= {f"{key}/{name}": value for name, value in digests.items()}
    for reward in {spec if isinstance(spec, str) else spec["name"] for spec in rewards} - {*REWARDS}:
        inputs |= {f"module {name} of {reward}": fingerprint(file) for name, file in source_files(reward).items()}
    return inputs
