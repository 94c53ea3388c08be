"""Stores a teacher's log-probs for a dataset on disk, so that distillation needs no teacher in memory.

The cache holds, for each completion token, the K most probable tokens at one temperature. It is a folder with

    teacher.json             the TeacherFacts, and for each shard: size, checksum, and its rows (key, number of tokens)
    shard-00000.safetensors  ids int32 [N, K], logprobs [N, K], tail float32 [N] for the N completion tokens of its rows

A shard is either complete or absent, and an interrupted run continues after the last complete shard. Training looks
rows up by their tokens, so it may read the rows in any order, or only some of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparse_rl.attention.interface import adopt
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.files import MOST_TEXT, open_tensors, read_json, replace_text, usual_permissions
from sparse_rl.models.load import base_of, head_of
from sparse_rl.progress import stage
from trainer.batch import Batch, Example
from trainer.checkpoint import sha256
from trainer.losses import TopK

INDEX, FORMAT = "teacher.json", 1


@dataclass(frozen=True)
class TeacherFacts:
    """The facts that determine the log-probs in a teacher cache: equal facts mean equal log-probs for equal rows.

    source : directory or Hub name from which the teacher was loaded
    teacher : fingerprint of the teacher's weights
    """

    source: str
    teacher: str
    vocab_size: int
    temperature: float
    top_k: int
    dtype: str


def row_key(example: Example) -> str:
    """Return a hash of a row's tokens and of the position where the completion begins."""
    tokens = f"{','.join(map(str, example.prompt))},{','.join(map(str, example.completion))}"
    return hashlib.blake2b(f"{len(example.prompt)}|{tokens}".encode(), digest_size=12).hexdigest()


def weights_fingerprint(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class TeacherCache:
    """Reads a teacher's log-probs from a folder that `sparse-rl teacher` has written.

    expected : required values of fields of TeacherFacts, name -> value

    Raises UserError if the cache is absent, unfinished or damaged, differs from `expected`, or lacks a row.
    """

    def __init__(self, folder: str | Path, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.facts, self.shards, complete = _read_index(self.folder)
        if not complete:
            raise UserError(f"{self.folder} is not finished; run sparse-rl teacher again to complete it")
        for name, value in (expected or {}).items():
            if (written := getattr(self.facts, name)) != value:
                raise UserError(f"{self.folder} was written with {name} {written}, but the recipe needs {value}")
        self.places: dict[str, tuple[str, int, int]] = {}
        for name, shard in self.shards.items():
            file, start = self.folder / name, 0
            if not file.is_file() or file.stat().st_size != shard["size"]:
                raise UserError(f"{file} is missing or truncated; run sparse-rl teacher again")
            for key, count in shard["rows"]:
                self.places[key] = name, start, start + count
                start += count
        self.opened: dict[str, Any] = {}

    def __contains__(self, example: Example) -> bool:
        return row_key(example) in self.places

    def read(self, examples: Sequence[Example], device: torch.device | str) -> TopK:
        """Return the teacher's most probable tokens at each completion token of the examples, concatenated."""
        parts = []
        for example in examples:
            place = self.places.get(row_key(example))
            if place is None:
                raise UserError(f"{self.folder} lacks a row of the dataset; run sparse-rl teacher")
            name, start, end = place
            parts.append([self._open(name).get_slice(part)[start:end] for part in ("ids", "logprobs", "tail")])
        ids, logprobs, tail = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
        return TopK(ids.long(), logprobs.float(), tail)

    def _open(self, name: str) -> Any:
        if name not in self.opened:
            file = self.folder / name
            if sha256(file) != self.shards[name]["sha256"]:
                raise UserError(f"the checksum of {file} differs; run sparse-rl teacher again")
            self.opened[name] = open_tensors(file)
        return self.opened[name]


def write_teacher_cache(
    folder: str | Path,
    teacher: Any,
    examples: Sequence[Example],
    facts: TeacherFacts,
    *,
    batch_size: int = 8,
    rows_per_shard: int = 512,
    chunk: int = 512,
    progress: bool = False,
) -> int:
    """Write the teacher's most probable tokens for the examples to a teacher cache.

    Returns the number of shards that existed and were kept. Raises UserError if the folder holds other facts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    adopt(teacher).eval()
    done: dict[str, Any] = {}
    if (folder / INDEX).exists():
        written, done, _ = _read_index(folder)
        pairs = ((key, getattr(written, key), value) for key, value in vars(facts).items())
        if differ := [f"{key} {stored} instead of {value}" for key, stored, value in pairs if stored != value]:
            raise UserError(f"{folder} is another teacher cache: {', '.join(differ)}; use another folder")
    shards: dict[str, Any] = {}
    whole = 0
    parts = [examples[start : start + rows_per_shard] for start in range(0, len(examples), rows_per_shard)]
    with stage("asking the teacher", total=len(examples), unit="sequence", shown=progress) as shown:
        for number, part in enumerate(parts):
            name = f"shard-{number:05d}.safetensors"
            keys = [[row_key(example), len(example.completion)] for example in part]
            if (folder / name).is_file() and done.get(name) == _shard(folder / name, keys):
                shards[name], whole = done[name], whole + 1
            else:
                partial = folder / f"{name}.partial"
                save_file(_shard_tensors(teacher, part, facts, batch_size, chunk), partial)
                usual_permissions(partial)
                os.replace(partial, folder / name)
                shards[name] = _shard(folder / name, keys)
                _write_index(folder, facts, shards, complete=False)
            shown.advance(len(part))
    _write_index(folder, facts, shards, complete=True)
    return whole


@torch.no_grad()
def _shard_tensors(
    teacher: Any, examples: Sequence[Example], facts: TeacherFacts, batch_size: int, chunk: int
) -> dict[str, Tensor]:
    device = next(teacher.parameters()).device
    head = head_of(base_of(teacher))
    batches: list[TopK] = []
    for start in range(0, len(examples), batch_size):
        hidden = Batch.make(examples[start : start + batch_size], device).hidden(teacher, replayed=False)
        batches.append(TopK.of_hidden(hidden, head, facts.top_k, facts.temperature, chunk))
        if bool(batches[-1].logprobs.isnan().any()):
            raise NotFiniteError(
                f"the log-probabilities of the teacher {facts.source} are not finite: its weights, or its activations "
                "in this dtype, are NaN or infinite; use an undamaged copy, or set another dtype"
            )
    whole = TopK.joined(batches)
    logprobs = whole.logprobs.to(getattr(torch, facts.dtype))
    return {"ids": whole.ids.int().cpu(), "logprobs": logprobs.cpu(), "tail": whole.tail.cpu()}


def _shard(file: Path, rows: list[list[Any]]) -> dict[str, Any]:
    return {"size": file.stat().st_size, "sha256": sha256(file), "rows": rows}  # rows: (key, completion tokens)


def _write_index(folder: Path, facts: TeacherFacts, shards: dict[str, Any], complete: bool) -> None:
    content = {"format_version": FORMAT, **dataclasses.asdict(facts), "complete": complete, "shards": shards}
    replace_text(folder / INDEX, json.dumps(content))


def _read_index(folder: Path) -> tuple[TeacherFacts, dict[str, Any], bool]:
    """Return the facts, name -> record of the shards, and True if the cache is complete."""
    try:
        content = read_json(folder / INDEX, MOST_TEXT)
        if content.pop("format_version") != FORMAT:
            raise UserError(f"its format version is not {FORMAT}")
        shards, complete = content.pop("shards"), content.pop("complete")
        return TeacherFacts(**content), shards, complete
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no teacher cache; write one with sparse-rl teacher") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / INDEX} cannot be read: {error}") from error
