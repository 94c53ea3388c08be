"""What one worker writes down of a run: what was dropped, and the log-prob of each token drawn.

It stays with the worker until the run is over, and then leaves in one piece per request. So the last step of a request
is in it like any other, although vLLM's scheduler has by then let the request go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from sparse_rl.trace import NEVER

STEPS = 64  # of decoding, whose evictions lie on the device at most


class Result(TypedDict):
    """What one tensor-parallel rank has recorded of one request. Arrays travel as bytes: vLLM sends no others untyped.

    preempted : the request lost its cache on the way, and what follows does not tell what it attended to
    evict_at : int32 [L, Hkv of this rank, tokens]; None: nothing was dropped
    logprobs : float32 [tokens sampled, 2], as sampled, and before top-k and top-p
    """

    preempted: bool
    evict_at: bytes | None
    logprobs: bytes


class Dropped(NamedTuple):
    """What was dropped of one request: positions int32 [count, L, Hkv], unseen from query `at`, int64 [count], on."""

    at: np.ndarray
    positions: np.ndarray


class RunRecord:
    """The record of one run, of this worker's kv heads. A new run begins a new one."""

    def __init__(self) -> None:
        self.place_of: dict[str, int] = {}  # vLLM's name of a request -> the engine's
        self.numbers: dict[str, int] = {}  # of requests, in the order in which they were admitted
        self.preempted: set[str] = set()
        self.dropped: dict[str, list[Dropped]] = {}
        # of tokens that came: their requests' numbers, positions, and what went; on the device, and in host memory
        self._arrived: list[tuple[Tensor, ...]] = []
        self._fetched: list[tuple[Tensor, ...]] = []
        self.drawn: list[tuple[list[str], list[int], Tensor]] = []  # requests, steps, log-probs; see `draw`
        self._logprobs: dict[str, dict[int, list[float]]] | None = None  # by request and step

    def begin(self, request_id: str) -> int:
        """A request was admitted: its number. A second time means that it was preempted, and has lost its cache."""
        if request_id in self.numbers:
            self.preempted.add(request_id)
            self.dropped.pop(request_id, None)
        return self.numbers.setdefault(request_id, len(self.numbers))

    def draw(self, request_ids: list[str], places: Sequence[int], steps: list[int], logprobs: Tensor) -> None:
        """One step's tokens were drawn: of request i the step-th, with float32 [B, 2] log-probs (see `Result`).

        Those of an unfinished prefill are void: their step is drawn again.
        """
        self.place_of.update(zip(request_ids, places, strict=True))
        self.drawn.append((request_ids, steps, logprobs))

    def drop(self, request_ids: Sequence[str], at: Sequence[int], counts: Sequence[int], positions: np.ndarray) -> None:
        """A compaction of R requests dropped counts[r] entries of each head of request r.

        positions : int32 [L, the sum of Hkv x counts], request by request, head by head
        """
        heads = positions.shape[1] // sum(counts)
        parts = np.split(positions, heads * np.cumsum(counts)[:-1], axis=1)
        for request_id, seen, count, mine in zip(request_ids, at, counts, parts, strict=True):
            by_token = mine.reshape(len(mine), heads, count).transpose(2, 0, 1)
            self.dropped.setdefault(request_id, []).append(Dropped(np.full(count, seen), by_token))

    def arrive(self, numbers: Tensor, now: Tensor, dropped: Tensor) -> None:
        """Tokens came, each of another request. The device is waited for once in STEPS calls.

        numbers, now : int64 [R], of their requests, and their positions; dropped : int [L, R, Hkv] what went, -1: none
        """
        self._arrived.append((numbers, now, dropped.int().transpose(0, 1)))
        if len(self._arrived) >= STEPS:
            self._fetch()

    def _fetch(self) -> None:
        """Bring what has come to host memory: of a long run it would fill a GPU's."""
        self._fetched.append(tuple(torch.cat(part).cpu() for part in zip(*self._arrived, strict=True)))
        self._arrived.clear()

    def _settle(self) -> None:
        """Sort what went as tokens came by request."""
        if self._arrived:
            self._fetch()
        if not self._fetched:
            return
        numbers, now, dropped = (torch.cat(part).numpy() for part in zip(*self._fetched, strict=True))
        self._fetched.clear()
        names = list(self.numbers)
        went = np.flatnonzero(dropped[:, 0, 0] >= 0)
        went = went[np.argsort(numbers[went], kind="stable")]
        for mine in np.split(went, np.flatnonzero(np.diff(numbers[went])) + 1):
            if len(mine):
                self.dropped.setdefault(names[numbers[mine[0]]], []).append(Dropped(now[mine], dropped[mine]))

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


def _by_step(drawn: list[tuple[list[str], list[int], Tensor]]) -> dict[str, dict[int, list[float]]]:
    """Request -> step -> its log-probs; of a step that was drawn several times, the last."""
    found: dict[str, dict[int, list[float]]] = {}
    pairs = iter(torch.cat([logprobs for *_, logprobs in drawn]).tolist() if drawn else ())
    for request_ids, steps, _ in drawn:
        for request_id, step, pair in zip(request_ids, steps, pairs, strict=False):
            found.setdefault(request_id, {})[step] = pair
    return found


def _evict_at(dropped: list[Dropped], length: int) -> np.ndarray:
    """int32 [L, Hkv, length] of one request. Row by row, and joined token by token: a policy may drop one at a time."""
    at, by_token = map(np.concatenate, zip(*dropped, strict=True))
    _, layers, heads = by_token.shape
    evict_at = np.full((layers * heads, length), NEVER, dtype=np.int32)
    for row, positions in zip(evict_at, np.ascontiguousarray(by_token.reshape(-1, layers * heads).T), strict=True):
        row[positions] = at
    return evict_at.reshape(layers, heads, length)
