"""Record of how the rollouts of a folder were sampled, and names of the folder's files. Does not import torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollout.config import EngineName, SamplingConfig
from sparse_rl.config import Configuration, PositiveInt, Source, Text, as_mapping, build, show
from sparse_rl.errors import UserError, unread
from sparse_rl.files import read_text

ORIGIN, COMPLETIONS, TRACES = "rollouts.json", "completions.jsonl", "traces-*.safetensors"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Origin(Configuration):
    """Record of how the rollouts of a folder were sampled.

    model : directory or hub name of the model
    vocabulary : size of the model's vocabulary
    engine, dtype, exact : values of these recipe keys when the rollouts were sampled
    sampling : settings of sampling
    evicts : true if entries can be evicted, so that there are trace files
    made_by : fingerprints that the trace files store: name (`model`, `policy`, ...) -> fingerprint
    """

    model: Text
    vocabulary: PositiveInt
    engine: EngineName
    dtype: Literal["float32", "bfloat16", "float16"]
    exact: bool
    sampling: SamplingConfig
    evicts: bool
    made_by: dict[str, str]


def write_origin(folder: Path, origin: Origin) -> None:
    record = {"format_version": FORMAT_VERSION, **as_mapping(origin)}
    (folder / ORIGIN).write_text(json.dumps(record, indent=2) + "\n")


def read_origin(folder: Path) -> Origin:
    """Read rollouts.json of a folder. Raises UserError if it is missing or cannot be read."""
    file = folder / ORIGIN
    if not folder.is_dir():
        wrong = f"is a file; name its folder, {folder.parent}" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {wrong}")
    if not file.is_file():
        inner = folder / "rollouts"
        mend = f"name {inner}" if (inner / ORIGIN).is_file() else "sparse-rl rollout RECIPE --out DIR writes some"
        raise UserError(f"{folder} holds no rollouts with their log-probs: there is no {ORIGIN}; {mend}")
    try:
        record = json.loads(read_text(file))
    except (OSError, ValueError, RecursionError) as error:
        why = unread(error) if isinstance(error, OSError | ValueError) else "nested too deeply"
        raise UserError(f"{file} cannot be read: {why}") from error
    version = record.pop("format_version", None) if isinstance(record, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(f"{file} has format version {show(version)}, but {FORMAT_VERSION} is needed; sample again")
    return build(Origin, record, "", Source(str(file)))
