"""Rollouts as files: a folder that holds sampled rollouts, with everything needed to replay them.

    rollouts.json              record of how the rollouts were sampled (`Origin` in config.py)
    completions.jsonl          one line per rollout: prompt_ids, completion_ids, logprobs, finish_reason, model_logprobs
                               if top-p, top-k or min-p cut the distribution (else they equal logprobs), spans of a
                               conversation, and the caller's keys
    traces-00000.safetensors   the traces of the first lines; further files hold the traces of the next lines. There are
                               no such files if nothing can be evicted and no supports are recorded

Log-probs are float32, written with enough digits to be read back bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rollout.config import COMPLETIONS, TRACES, Origin, SamplingConfig, write_origin
from rollout.engine import Rollout
from rollout.sampling import token_ids
from sparse_rl.errors import UserError, unread
from sparse_rl.trace import EvictionTrace, load_traces, save_traces

Dense = Callable[..., EvictionTrace]  # from `length`, the number of tokens, to the trace of a full cache
# keys of a line for its rollout
OWN = ("prompt_ids", "completion_ids", "logprobs", "model_logprobs", "finish_reason", "spans")
PART = 64  # number of lines read at a time when there are no trace files


@dataclass(frozen=True)
class Part:
    """Rollouts on consecutive lines of completions.jsonl.

    file : the file of the rollouts' traces, or completions.jsonl if there are no trace files
    line : line of the first rollout in completions.jsonl, counted from 1
    further : further keys of each line, which the caller of `written_rollouts` gave
    """

    file: Path
    line: int
    rollouts: list[Rollout]
    further: list[dict[str, Any]]

    @classmethod
    def of(cls, file: Path, line: int, pairs: Sequence[tuple[Rollout, dict[str, Any]]]) -> Part:
        return cls(file, line, [rollout for rollout, _ in pairs], [further for _, further in pairs])


Add = Callable[[Sequence[Rollout], Sequence[Mapping[str, Any]]], None]


@contextmanager
def written_rollouts(folder: Path, origin: Origin) -> Iterator[Add]:
    """Write rollouts to the files of a folder, in place of those of an earlier call. Yields a function
    `add(rollouts, further)`, which appends rollouts with further keys and values of their lines.
    """
    for earlier_file in folder.glob(TRACES):
        earlier_file.unlink()
    write_origin(folder, origin)
    parts = lines = 0
    with (folder / COMPLETIONS).open("w") as log:

        def add(rollouts: Sequence[Rollout], further: Sequence[Mapping[str, Any]]) -> None:
            nonlocal parts, lines
            lines += len(rollouts)
            if origin.has_traces:
                file = folder / TRACES.replace("*", f"{parts:05d}")
                save_traces(file, [r.trace for r in rollouts], origin.made_by)
                parts += 1
            for rollout, extra in zip(rollouts, further, strict=True):
                log.write(json.dumps({**extra, **_as_line(rollout, origin.sampling)}, default=str) + "\n")
            log.flush()

        yield add
    if origin.rollouts not in (None, lines):  # prefilled turns: their number was unknown, and rollouts above it
        write_origin(folder, replace(origin, rollouts=lines))


def _as_line(rollout: Rollout, sampling: SamplingConfig) -> dict[str, Any]:
    names = ["finish_reason", "prompt_ids", "completion_ids", *(["spans"] if rollout.spans else [])]
    line = {name: getattr(rollout, name) for name in names}
    for name in ("logprobs", "model_logprobs")[: 1 + sampling.truncated_support]:
        line[name] = [float(f"{x:.9g}") for x in getattr(rollout, name)]  # fewest digits that identify every float32
    return line


@dataclass(frozen=True)
class RolloutFiles:
    """The rollouts of a folder. origin : result of `read_origin` for this folder"""

    folder: Path
    origin: Origin

    def parts(self, layers: int, kv_heads: int, windows: Sequence[int] = ()) -> Iterator[Part]:
        """Yield all rollouts in the order of their lines, one trace file at a time.

        layers, kv_heads, windows : arguments of `EvictionTrace.dense`, which builds the traces if there are no files

        Raises UserError if a line is not a valid rollout, or if the traces do not belong to the lines.
        """
        files = sorted(self.folder.glob(TRACES))
        if self.origin.has_traces and not files:
            raise UserError(f"{self.folder} lacks its traces, {TRACES}: copy the trace files too, or sample again")
        count = 0
        with self._opened() as log:
            lines = enumerate(log, start=1)
            for file in files if self.origin.has_traces else ():
                traces = load_traces(file, self.origin.made_by)
                loaded = list(islice(lines, len(traces)))
                if len(loaded) < len(traces):
                    wrong = f"holds {len(traces)} traces, but {COMPLETIONS} has only {len(loaded)} lines left"
                    raise UserError(f"{file} {wrong}: the two files were not written by one call; sample again")
                pairs = zip(loaded, traces, strict=True)
                yield Part.of(file, count + 1, [self._rollout(*line, trace, file) for line, trace in pairs])
                count += len(traces)
            dense = partial(EvictionTrace.dense, layers, kv_heads, windows=windows)
            while not self.origin.has_traces and (loaded := list(islice(lines, PART))):
                rollouts = [self._rollout(*line, dense, self.folder / COMPLETIONS) for line in loaded]
                yield Part.of(self.folder / COMPLETIONS, count + 1, rollouts)
                count += len(loaded)
            if next(lines, None) is not None:
                wrong = f"{COMPLETIONS} has more lines than the {count} traces"
                raise UserError(f"{self.folder}: {wrong}; copy the missing trace files, or sample again")
        if not count:
            raise UserError(f"{self.folder / COMPLETIONS} is empty; sample again")
        if count != (self.origin.rollouts or count):
            wrong = f"holds {count} of {self.origin.rollouts} rollouts"
            raise UserError(
                f"{self.folder} {wrong}: sparse-rl rollout is still writing it, or was stopped; sample again"
            )

    @contextmanager
    def _opened(self) -> Iterator[Iterator[str]]:
        file = self.folder / COMPLETIONS
        try:
            with file.open(encoding="utf-8") as log:
                yield log
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {unread(error)}") from error

    def _rollout(
        self, number: int, text: str, trace: EvictionTrace | Dense, file: Path
    ) -> tuple[Rollout, dict[str, Any]]:
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise UserError("the line is not a mapping")
            names = ("prompt_ids", "completion_ids")
            ((prompt,), (completion,)) = (token_ids([line.get(x) or ()], self.origin.vocabulary, x) for x in names)
            logprobs = model_logprobs = _logprobs(line, "logprobs", len(completion))
            if self.origin.sampling.truncated_support:
                model_logprobs = _logprobs(line, "model_logprobs", len(completion))
            own = trace if isinstance(trace, EvictionTrace) else trace(length=len(prompt) + len(completion))
            if len(own) != (tokens := len(prompt) + len(completion)):
                wrong = f"{file} holds a trace of {len(own)} tokens, but the line has {tokens}"
                raise UserError(f"{wrong}: the two files do not belong together")
            reason: Literal["stop", "length"] = "stop" if line.get("finish_reason") == "stop" else "length"
            rollout = Rollout(prompt, completion, logprobs, model_logprobs, own, reason, _spans(line))
        except (ValueError, RecursionError) as error:
            problem = error.message if isinstance(error, UserError) else f"the line is not JSON ({error})"
            raise UserError(f"{self.folder / COMPLETIONS}, line {number}: {problem}") from None
        return rollout, {name: value for name, value in line.items() if name not in OWN}


def _spans(line: Mapping[str, Any]) -> list[tuple[int, int]]:
    loaded = line.get("spans", [])
    pairs = isinstance(loaded, list) and all(isinstance(span, list) for span in loaded)
    if not pairs or any(list(map(type, span)) != [int, int] for span in loaded):
        raise UserError("spans is not a list of pairs of whole numbers; sample again")
    return [(start, end) for start, end in loaded]


def _logprobs(line: Mapping[str, Any], name: str, tokens: int) -> list[float]:
    loaded = line.get(name)
    if not isinstance(loaded, list) or len(loaded) != tokens:
        raise UserError(f"the line has no list {name} of the {tokens} sampled tokens; sample again")
    if any(type(value) not in (float, int) or not -math.inf < value <= 0 for value in loaded):
        raise UserError(f"{name} has a value that is not a log-prob, which is a finite number <= 0")
    return loaded
