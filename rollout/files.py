"""Rollouts as files: a folder that holds sampled rollouts, with everything needed to replay them.

    rollouts.json              record of how the rollouts were sampled (origin.py)
    completions.jsonl          one line per rollout: prompt_ids, completion_ids, logprobs, finish_reason, model_logprobs
                               if top-p or top-k cut the distribution (else they equal logprobs), and the caller's keys
    traces-00000.safetensors   the traces of the first lines; further files hold the traces of the next lines. There are
                               no such files if nothing can be evicted

Log-probs are float32, written with enough digits to be read back bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rollout.config import SamplingConfig
from rollout.engine import Rollout
from rollout.origin import COMPLETIONS, TRACES, Origin, write_origin
from rollout.requests import token_ids
from sparse_rl.errors import UserError, unread
from sparse_rl.trace import EvictionTrace, load_traces, save_traces

Dense = Callable[..., EvictionTrace]  # from `length`, the number of tokens, to the trace of a full cache
PART = 64  # number of lines read at a time when there are no trace files


@dataclass(frozen=True)
class Part:
    """Rollouts on consecutive lines of completions.jsonl.

    file : the file of the rollouts' traces, or completions.jsonl if there are no trace files
    line : line of the first rollout in completions.jsonl, counted from 1
    """

    file: Path
    line: int
    rollouts: list[Rollout]


Add = Callable[[Sequence[Rollout], Sequence[Mapping[str, Any]]], None]


@contextmanager
def written_rollouts(folder: Path, origin: Origin) -> Iterator[Add]:
    """Write rollouts to the files of a folder. The files of an earlier call are replaced.

    Yields a function `add(rollouts, further)`, which appends rollouts. `further` holds one mapping per rollout: further
    keys and values for the rollout's line of completions.jsonl.
    """
    for earlier_file in folder.glob(TRACES):
        earlier_file.unlink()
    write_origin(folder, origin)
    parts = 0
    with (folder / COMPLETIONS).open("w") as log:

        def add(rollouts: Sequence[Rollout], further: Sequence[Mapping[str, Any]]) -> None:
            nonlocal parts
            if origin.evicts:
                file = folder / TRACES.replace("*", f"{parts:05d}")
                save_traces(file, [r.trace for r in rollouts], origin.made_by)
                parts += 1
            for rollout, extra in zip(rollouts, further, strict=True):
                log.write(json.dumps({**extra, **_as_line(rollout, origin.sampling)}) + "\n")
            log.flush()

        yield add


def _as_line(rollout: Rollout, sampling: SamplingConfig) -> dict[str, Any]:
    line: dict[str, Any] = {
        "finish_reason": rollout.finish_reason,
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "logprobs": list(map(_in_float32, rollout.logprobs)),
    }
    if sampling.truncated_support:
        line["model_logprobs"] = list(map(_in_float32, rollout.model_logprobs))
    return line


def _in_float32(number: float) -> float:
    """Round a float32 number to 9 significant digits, the fewest that identify every float32 number."""
    return float(f"{number:.9g}")


@dataclass(frozen=True)
class RolloutFiles:
    """The rollouts of a folder. origin : result of `read_origin` for this folder"""

    folder: Path
    origin: Origin

    def parts(self, layers: int, kv_heads: int, windows: Sequence[int] = ()) -> Iterator[Part]:
        """Yield all rollouts in the order of their lines, one trace file at a time.

        layers, kv_heads, windows : the model's numbers, and the sliding window of each layer, as `EvictionTrace.dense`
            takes them; traces are built from them if there are no trace files

        Raises UserError if a line is not a valid rollout, or if the traces do not belong to the lines.
        """
        files = sorted(self.folder.glob(TRACES))
        if self.origin.evicts and not files:
            raise UserError(f"{self.folder} lacks its traces, {TRACES}: copy the trace files too, or sample again")
        count = 0
        with self._opened() as log:
            lines = enumerate(log, start=1)
            for file in files if self.origin.evicts else ():
                traces = load_traces(file, self.origin.made_by)
                loaded = list(islice(lines, len(traces)))
                if len(loaded) < len(traces):
                    wrong = f"holds {len(traces)} traces, but {COMPLETIONS} has only {len(loaded)} lines left"
                    raise UserError(f"{file} {wrong}: the two files were not written by one call; sample again")
                pairs = zip(loaded, traces, strict=True)
                yield Part(file, count + 1, [self._rollout(*line, trace, file) for line, trace in pairs])
                count += len(traces)
            dense = partial(EvictionTrace.dense, layers, kv_heads, windows=windows)
            while not self.origin.evicts and (loaded := list(islice(lines, PART))):
                rollouts = [self._rollout(*line, dense, self.folder / COMPLETIONS) for line in loaded]
                yield Part(self.folder / COMPLETIONS, count + 1, rollouts)
                count += len(loaded)
            if next(lines, None) is not None:
                wrong = f"{COMPLETIONS} has more lines than the {count} traces"
                raise UserError(f"{self.folder}: {wrong}; copy the missing trace files, or sample again")
        if not count:
            raise UserError(f"{self.folder / COMPLETIONS} is empty; sample again")

    @contextmanager
    def _opened(self) -> Iterator[Iterator[str]]:
        file = self.folder / COMPLETIONS
        try:
            with file.open(encoding="utf-8") as log:
                yield log
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {unread(error)}") from error

    def _rollout(self, number: int, text: str, trace: EvictionTrace | Dense, file: Path) -> Rollout:
        """Return the rollout of a line. `trace` is its trace, or a function from its length to its trace."""
        try:
            rollout = self._parsed(text, trace)
        except (ValueError, RecursionError) as error:
            problem = error.message if isinstance(error, UserError) else f"the line is not JSON ({error})"
            raise UserError(f"{self.folder / COMPLETIONS}, line {number}: {problem}") from None
        tokens = len(rollout.prompt_ids) + len(rollout.completion_ids)
        if len(rollout.trace) != tokens:
            line = f"line {number} of {COMPLETIONS} has {tokens}: the two files do not belong together"
            raise UserError(f"{file} holds a trace of {len(rollout.trace)} tokens, but {line}")
        return rollout

    def _parsed(self, text: str, trace: EvictionTrace | Dense) -> Rollout:
        line = json.loads(text)
        if not isinstance(line, dict):
            raise UserError("the line is not a mapping")
        prompt, completion = (_ids(line, name, self.origin.vocabulary) for name in ("prompt_ids", "completion_ids"))
        logprobs = model_logprobs = _logprobs(line, "logprobs", len(completion))
        if self.origin.sampling.truncated_support:
            model_logprobs = _logprobs(line, "model_logprobs", len(completion))
        if not isinstance(trace, EvictionTrace):
            trace = trace(length=len(prompt) + len(completion))
        stopped = line.get("finish_reason") == "stop"
        return Rollout(prompt, completion, logprobs, model_logprobs, trace, "stop" if stopped else "length")


def _ids(line: Mapping[str, Any], name: str, vocabulary: int) -> list[int]:
    if not isinstance(line.get(name), list):
        raise UserError(f"the line has no list {name}")
    try:
        return token_ids([line[name]], vocabulary)[0]
    except UserError as error:
        raise UserError(error.message.replace("prompt 0", name, 1)) from None


def _logprobs(line: Mapping[str, Any], name: str, tokens: int) -> list[float]:
    loaded = line.get(name)
    if not isinstance(loaded, list):
        raise UserError(f"the line has no list {name}: the log-probs of the sampled tokens are missing; sample again")
    if any(type(value) not in (float, int) or not -math.inf < value <= 0 for value in loaded):
        raise UserError(f"{name} has a value that is not a log-prob, which is a finite number <= 0")
    if len(loaded) != tokens:
        raise UserError(f"the line has {len(loaded)} {name}, but {tokens} completion_ids")
    return loaded
