"""What one worker writes down of a run: what was dropped, and the log-prob of each token drawn.

It stays with the worker until the run is over, and then leaves in one piece per request. So the last step of a request
is in it like any other, although vLLM's scheduler has by then let the request go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollout.vllm.messages import Result
from sparse_rl.trace import NEVER

STEPS = 64  # of decoding, whose evictions lie on the device at most


@dataclass
class Dropped:
    """What was dropped of one request: positions int32 [L, Hkv, count], unseen from query `at`, int64 [count], on."""

    at: np.ndarray
    positions: np.ndarray


@dataclass
class Arrived:
    """R tokens that came: int64 [R] numbers of their requests, and positions; int32 [L, R, Hkv] what went, -1: none."""

    numbers: torch.Tensor
    now: torch.Tensor
    dropped: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[Arrived]) -> Arrived:
        """The tokens of all parts, one after another."""
        return cls(
            torch.cat([each.numbers for each in parts]),
            torch.cat([each.now for each in parts]),
            torch.cat([each.dropped for each in parts], dim=1),
        )


@dataclass
class Drawn:
    """One step's tokens: of request i the step-th, with float32 [B, 2] log-probs (see `Result`)."""

    request_ids: list[str]
    steps: list[int]
    logprobs: torch.Tensor


class RunRecord:
    """The record of one run, of this worker's kv heads. A new run begins a new one."""

    def __init__(self) -> None:
        self.place_of: dict[str, int] = {}  # vLLM's name of a request -> the engine's
        self.begun: set[str] = set()
        self.preempted: set[str] = set()
        self.dropped: dict[str, list[Dropped]] = {}
        self.names: list[str] = []  # of requests, in the order in which they were admitted
        self._arrived: list[Arrived] = []  # on the device
        self._fetched: list[Arrived] = []  # in host memory
        self.drawn: list[Drawn] = []
        self._logprobs: dict[str, dict[int, list[float]]] | None = None  # by request and step

    def begin(self, request_id: str) -> int:
        """A request was admitted: its number. A second time means that it was preempted, and has lost its cache."""
        if request_id in self.begun:
            self.preempted.add(request_id)
            self.dropped.pop(request_id, None)
        self.begun.add(request_id)
        self.names.append(request_id)
        return len(self.names) - 1

    def draw(self, request_ids: list[str], places: Sequence[int], steps: list[int], logprobs: torch.Tensor) -> None:
        """One step's tokens were drawn. Those of an unfinished prefill are void: their step is drawn again."""
        self.place_of.update(zip(request_ids, places, strict=True))
        self.drawn.append(Drawn(request_ids, steps, logprobs))

    def drop(self, request_ids: Sequence[str], at: Sequence[int], counts: Sequence[int], positions: np.ndarray) -> None:
        """A compaction of R requests dropped counts[r] entries of each head of request r.

        positions : int32 [L, the sum of Hkv x counts], request by request, head by head
        """
        heads = positions.shape[1] // sum(counts)
        ends = heads * np.cumsum(counts)
        for request_id, seen, count, end in zip(request_ids, at, counts, ends, strict=True):
            mine = positions[:, end - heads * count : end].reshape(len(positions), heads, count)
            self.dropped.setdefault(request_id, []).append(Dropped(np.full(count, seen), mine))

    def arrive(self, numbers: torch.Tensor, now: torch.Tensor, dropped: torch.Tensor) -> None:
        """Tokens came, each of another request; see Arrived. The device is waited for once in STEPS calls."""
        self._arrived.append(Arrived(numbers, now, dropped.int()))
        if len(self._arrived) >= STEPS:
            self._fetch()

    def _fetch(self) -> None:
        """Bring what has come to host memory: of a long run it would fill a GPU's."""
        joined = Arrived.joined(self._arrived)
        self._fetched.append(Arrived(joined.numbers.cpu(), joined.now.cpu(), joined.dropped.cpu()))
        self._arrived.clear()

    def _settle(self) -> None:
        """Sort what went as tokens came by request."""
        if self._arrived:
            self._fetch()
        if not self._fetched:
            return
        joined = Arrived.joined(self._fetched)
        numbers, now, dropped = joined.numbers.numpy(), joined.now.numpy(), joined.dropped.numpy()
        self._fetched.clear()
        went = np.flatnonzero(dropped[0, :, 0] >= 0)
        went = went[np.argsort(numbers[went], kind="stable")]
        for mine in np.split(went, np.flatnonzero(np.diff(numbers[went])) + 1):
            if len(mine):
                one = Dropped(now[mine], dropped[:, mine].transpose(0, 2, 1))
                self.dropped.setdefault(self.names[numbers[mine[0]]], []).append(one)

    def take(self, lengths: dict[int, int]) -> list[Result]:
        """The results of these places, each a sequence of so many tokens, in this order; they are forgotten here."""
        if self._logprobs is None:
            self._logprobs = _by_step(self.drawn)
            self.drawn.clear()
            self._settle()
        request_of = {place: request_id for request_id, place in self.place_of.items()}
        results: list[Result] = []
        for place, length in lengths.items():
            request_id = request_of[place]
            drawn, dropped = self._logprobs.pop(request_id), self.dropped.pop(request_id, None)
            logprobs = np.array([drawn[step] for step in range(len(drawn))], np.float32)
            results.append(
                {
                    "preempted": request_id in self.preempted,
                    "evict_at": None if dropped is None else _evict_at(dropped, length).tobytes(),
                    "logprobs": logprobs.tobytes(),
                }
            )
        return results


def _by_step(drawn: list[Drawn]) -> dict[str, dict[int, list[float]]]:
    """Request -> step -> its log-probs; of a step that was drawn several times, the last."""
    logprobs: dict[str, dict[int, list[float]]] = {}
    if drawn:
        pairs = iter(torch.cat([each.logprobs for each in drawn]).tolist())
        for each in drawn:
            for request_id, step in zip(each.request_ids, each.steps, strict=True):
                logprobs.setdefault(request_id, {})[step] = next(pairs)
    return logprobs


def _evict_at(dropped: list[Dropped], length: int) -> np.ndarray:
    """int32 [L, Hkv, length] of one request. Row by row, and joined token by token: a policy may drop one at a time."""
    layers, heads, _ = dropped[0].positions.shape
    at = np.concatenate([each.at for each in dropped]).astype(np.int32)
    by_token = np.concatenate([each.positions.transpose(2, 0, 1) for each in dropped]).reshape(-1, layers * heads)
    evict_at = np.full((layers * heads, length), NEVER, dtype=np.int32)
    for row, positions in zip(evict_at, np.ascontiguousarray(by_token.T), strict=True):
        row[positions] = at
    return evict_at.reshape(layers, heads, length)
