"""The samplers of a worker, and its record: log-probs of the tokens, evicted ("dropped") entries, experts, supports.

The samplers replace one part of vLLM's sampler, top-k, top-p and sampling, by the reference engine's sampler
(rollout/sampling.py). So everywhere a sampled token depends only on the logits and the seed. `runner`
(compat/runner.py) says which request each row of logits belongs to.

The worker keeps the record until the run is over, and then sends the engine one result per request. So a result
includes the request's last step, which is recorded after vLLM's scheduler has released the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from rollout.config import SamplingConfig
from rollout.sampling import Uniforms, forced_token, sample
from sparse_rl.trace import NEVER
from sparse_rl.trace.support import SupportRecord

NOT_FINITE = -1  # sent in place of a token whose log-probs are not finite (compat/runner.py); no token has this id
STEPS = 64  # maximum number of steps whose routed experts are held on the device
HELD = 2**22  # number of evictions, over all layers and kv heads, from which on they are fetched from the device


class Result(TypedDict):
    """Record of one request in one tensor-parallel rank. Arrays are bytes, because vLLM's RPC cannot return arrays.

    evict_at : int32 [L, Hkv of this rank, number of tokens]; None if nothing was dropped
    logprobs : float32 [number of sampled tokens, 2], under the sampling distribution, and before truncation
    routed : int16 [number of tokens, L, K], the experts that each token took; None for a model without experts
    supports : name -> int32 array and shape, the sections of supports, if they are recorded
    versions : of a server: versions of the weights at the request's admission and at its last token
    """

    evict_at: bytes | None
    logprobs: bytes
    routed: bytes | None
    supports: dict[str, tuple[bytes, list[int]]]
    versions: list[int]


class Dropped(NamedTuple):
    """Dropped entries of one request: `count` entries of each kv head of each layer.

    at : int64 [count], position of the first query that no longer attends to the entry
    positions : int32 [count, L, Hkv], positions of the entries
    """

    at: np.ndarray
    positions: np.ndarray


class RunRecord:
    """Record of one run, for this worker's kv heads."""

    def __init__(self) -> None:
        self.place_of: dict[str, int] = {}  # vLLM's request id -> the engine's place of the request
        self.numbers: dict[str, int] = {}  # request id -> number, in the order of admission
        self.holder_of: dict[str, str] = {}  # request id -> id of the holder with whose entries it began, or ""
        self.dropped: dict[str, list[Dropped]] = {}
        # the arguments of `evict`: on the device, then in host memory
        self._evicted: list[tuple[Tensor, ...]] = []
        self._held = 0
        self._fetched: list[tuple[Tensor, ...]] = []
        self.drawn: list[tuple[list[str], list[int], Tensor]] = []  # requests, steps, log-probs; see `draw`
        self.supports = SupportRecord()
        self._routed: list[tuple[list[str], np.ndarray, np.ndarray, Tensor]] = []  # the arguments of `route`, per step
        # request id -> (position of the first token, experts of the tokens, int16 [tokens, L, K]), per step
        self.routed: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._logprobs: dict[str, dict[int, list[float]]] | None = None  # request id -> step -> log-probs

    def begin(self, request_id: str, holder: str = "") -> int:
        self.holder_of[request_id] = holder
        return self.numbers.setdefault(request_id, len(self.numbers))

    def draw(self, request_ids: list[str], places: Sequence[int], steps: list[int], logprobs: Tensor) -> None:
        """Record the log-probs of the tokens that one step has sampled, float32 [B, 2] as in `Result`.

        places : index of each request in the engine's list of requests
        steps : index of each token in its completion; a token sampled before the prefill's end is sampled again
        """
        self.place_of.update(zip(request_ids, places, strict=True))
        self.drawn.append((request_ids, steps, logprobs))

    def route(self, request_ids: list[str], first: np.ndarray, counts: np.ndarray, experts: Tensor) -> None:
        """Record the experts that the tokens of one step took. Waits for the device once in STEPS calls.

        first, counts : int [R], position of the first token of each request in this step, and number of its tokens
        experts : int16 [sum of counts, L, K]; the tensor may change after the call
        """
        self._routed.append((request_ids, first.copy(), counts.copy(), experts.clone()))
        if len(self._routed) >= STEPS:
            self._settle_routes()

    def _settle_routes(self) -> None:
        if not self._routed:
            return
        experts = torch.cat([step[-1] for step in self._routed]).cpu().numpy()
        start = 0
        for request_ids, first, counts, _ in self._routed:
            for request_id, position, count in zip(request_ids, first.tolist(), counts.tolist(), strict=True):
                self.routed.setdefault(request_id, []).append((position, experts[start : start + count]))
                start += count
        self._routed.clear()

    def evict(self, numbers: Tensor, at: Tensor, positions: Tensor) -> None:
        """Record n entries that each kv head of each layer drops. Waits for the device only once in HELD evictions.

        numbers, at : int64 [n], numbers of the requests, and positions of the first queries that no longer attend to
            the entries
        positions : int [n, L, Hkv], positions of the entries; -1 means none
        """
        self._evicted.append((numbers, at, positions.int()))
        self._held += positions.numel()
        if self._held >= HELD:  # those of a long run would fill a GPU's memory
            self._fetch()

    def _fetch(self) -> None:
        if self._evicted:
            self._fetched.append(tuple(torch.cat(column).cpu() for column in zip(*self._evicted, strict=True)))
            self._evicted, self._held = [], 0

    def _settle(self) -> None:
        self._fetch()
        if not self._fetched:
            return
        numbers, now, dropped = (torch.cat(column).numpy() for column in zip(*self._fetched, strict=True))
        self._fetched.clear()
        names = {number: request_id for request_id, number in self.numbers.items()}
        evictions = np.flatnonzero(dropped[:, 0, 0] >= 0)
        evictions = evictions[np.argsort(numbers[evictions], kind="stable")]
        for part in np.split(evictions, np.flatnonzero(np.diff(numbers[evictions])) + 1):
            if len(part) and (request_id := names.get(int(numbers[part[0]]))) is not None:
                self.dropped.setdefault(request_id, []).append(Dropped(now[part], dropped[part]))

    def take(self, lengths: dict[int, int]) -> list[Result]:
        """Return the results of requests, given as place -> number of tokens of the sequence, and forget them."""
        if self._logprobs is None:
            self._logprobs = _by_step(self.drawn)
            self.drawn.clear()
            self._settle()
            self._settle_routes()
        request_of = {place: request_id for request_id, place in self.place_of.items()}
        return [self._result(request_of[place], self._logprobs, length) for place, length in lengths.items()]

    def _result(self, request_id: str, by_step: dict[str, dict[int, list[float]]], length: int) -> Result:
        drawn, dropped = by_step.pop(request_id), self.dropped.pop(request_id, None)
        routed = self.routed.get(self.holder_of.get(request_id, ""), []) + self.routed.pop(request_id, [])
        logprobs = np.array([drawn[step] for step in range(len(drawn))], np.float32)
        supports = self.supports.take(request_id, length)
        return {
            "evict_at": None if dropped is None else _evict_at(dropped, length).tobytes(),
            "logprobs": logprobs.tobytes(),
            "routed": _by_position(routed, length),
            "supports": {name: (x.numpy().tobytes(), [*x.shape]) for name, x in supports.items()},
            "versions": [],
        }


class ServerRecord(RunRecord):
    """The record of a server, without an end: a rollout is taken when it is done, or forgotten, and its place is then
    given out again. Requests that are not admitted, those of other clients, are not recorded.

    version : of the weights that forward passes run under from now on; -1 if they are not whole
    """

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.versions: dict[str, list[int]] = {}  # request id -> versions at admission and at the last draw
        self.by_step: dict[str, dict[int, list[float]]] = {}  # request id -> step -> log-probs
        self._numbers = itertools.count(1)

    def admit(self, request_id: str, place: int) -> None:
        """Record a request from now on; a second call for it, after a preemption, changes nothing."""
        if request_id not in self.place_of:
            self.place_of[request_id], self.numbers[request_id] = place, next(self._numbers)
            self.versions[request_id] = [self.version, self.version]

    def begin(self, request_id: str, holder: str = "") -> int:
        if request_id in self.numbers:
            self.holder_of[request_id] = holder
        return self.numbers.get(request_id, 0)  # nobody's number

    def evict(self, numbers: Tensor, at: Tensor, positions: Tensor) -> None:
        super().evict(numbers, at, positions)
        if self._fetched:
            self._settle()  # lets go of those of other clients

    def _settle_routes(self) -> None:
        super()._settle_routes()
        for request_id in self.routed.keys() - self.place_of.keys():  # of other clients
            del self.routed[request_id]

    def draw(self, request_ids: list[str], places: Sequence[int], steps: list[int], logprobs: Tensor) -> None:
        self.drawn.append((request_ids, steps, logprobs))
        for request_id in self.versions.keys() & set(request_ids):
            self.versions[request_id][1] = self.version

    def take(self, lengths: dict[int, int]) -> list[Result]:
        self._settle_all()
        request_of = {place: request_id for request_id, place in self.place_of.items()}
        results = []
        for place, length in lengths.items():
            result = self._result(request_id := request_of[place], self.by_step, length)
            result["versions"] = self.versions[request_id]
            results.append(result)
        self.forget(list(lengths))
        return results

    def forget(self, places: Sequence[int]) -> None:
        """Let go of the requests at places: taken, failed, or aborted, some of which may never have been admitted."""
        self._settle_all()
        self.supports.settle()
        for request_id in [name for name, place in self.place_of.items() if place in places]:
            del self.place_of[request_id], self.numbers[request_id]
        kept: list[dict[Any, Any]] = [self.versions, self.by_step, self.holder_of]
        for by_request in [*kept, self.dropped, self.routed, self.supports.drawn]:
            for request_id in by_request.keys() - self.place_of.keys():
                del by_request[request_id]

    def _settle_all(self) -> None:
        for request_id, by_step in _by_step(self.drawn).items():
            self.by_step.setdefault(request_id, {}).update(by_step)
        self.drawn.clear()
        self._settle()
        self._settle_routes()


def _by_step(drawn: list[tuple[list[str], list[int], Tensor]]) -> dict[str, dict[int, list[float]]]:
    """Return request id -> step -> log-probs of the step's token, as recorded last."""
    by_request: dict[str, dict[int, list[float]]] = {}
    pairs = iter(torch.cat([logprobs for *_, logprobs in drawn]).tolist() if drawn else ())
    for request_ids, steps, _ in drawn:
        for request_id, step, pair in zip(request_ids, steps, pairs, strict=False):
            by_request.setdefault(request_id, {})[step] = pair
    return by_request


def _evict_at(dropped: list[Dropped], length: int) -> np.ndarray:
    at, by_token = map(np.concatenate, zip(*dropped, strict=True))
    _, layers, heads = by_token.shape
    evict_at = np.full((layers * heads, length), NEVER, dtype=np.int32)  # filled by head: `dropped` may be by token
    for row, positions in zip(evict_at, np.ascontiguousarray(by_token.reshape(-1, layers * heads).T), strict=True):
        row[positions] = at
    return evict_at.reshape(layers, heads, length)


def _by_position(routed: list[tuple[int, np.ndarray]], length: int) -> bytes | None:
    """Return the experts of one request's tokens, int16 [length, L, K], with -1 for the last token, which is not fed.
    The last record of a token counts.
    """
    if not routed:
        return None
    experts = np.full((length, *routed[0][1].shape[1:]), -1, np.int16)
    for first, part in routed:
        experts[first : first + len(part)] = part[: length - first]
    return experts.tobytes()


def joined(
    ranks: Sequence[Result], shape: tuple[int, int], length: int
) -> tuple[list[float], list[float], Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Join the results of all tensor-parallel ranks for a request with `length` tokens, in a model with (layers, kv
    heads) `shape`. Returns the two columns of log-probs, the evictions int32 [L, Hkv, length], and two mappings of
    sections: what the model's routers chose, and the supports.
    """
    evict_at = torch.full((*shape, length), NEVER, dtype=torch.int32)
    if parts := [rank["evict_at"] for rank in ranks if rank["evict_at"] is not None]:
        heads = [np.frombuffer(part, np.int32).reshape(shape[0], -1, length) for part in parts]
        evict_at = torch.from_numpy(np.concatenate(heads, axis=1))
    sections = {}
    if (routed := ranks[0]["routed"]) is not None:
        by_token = np.frombuffer(routed, np.int16).reshape(length, shape[0], -1)
        sections["routed"] = torch.from_numpy(by_token.transpose(1, 0, 2).copy())
    supports = {
        name: torch.from_numpy(np.frombuffer(values, np.int32).reshape(sizes).copy())
        for name, (values, sizes) in ranks[0]["supports"].items()
    }
    logprobs, model_logprobs = np.frombuffer(ranks[0]["logprobs"], np.float32).reshape(-1, 2).T.tolist()
    return logprobs, model_logprobs, evict_at, sections, supports


# ---- the samplers ----------------------------------------------------------------------------------------------------


class SeededSampler(nn.Module):
    """Samples a server's requests that have a seed (compat/server.py); vLLM's sampler `plain` samples the others.

    A request's n-th token is sampled with the n-th uniform number of its seed. After each chunk of a prompt except the
    last, vLLM discards the sampled token, so the next step uses the same uniform number again.
    """

    def __init__(self, runner: Any, plain: nn.Module) -> None:
        super().__init__()
        self.runner, self.plain = runner, plain
        # (request id, seed) -> stream and settings, for the requests of the previous step
        self.seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Any]:
        drawn = self._draw(logits)  # first, because vLLM's own sampler writes into the logits
        sampled, logprobs = self.plain(logits, generators, k, p)
        for rows, tokens in drawn:
            sampled.index_copy_(0, rows, tokens.to(sampled.dtype))
        return sampled, logprobs

    def _draw(self, logits: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Sample tokens for the requests that have a seed: for each pair of top_p and top_k, (rows, tokens), int64."""
        seeded: dict[tuple[str, int], tuple[Uniforms, SamplingConfig]] = {}
        by_support: dict[SamplingConfig, list[tuple[int, float]]] = {}
        for row, request in enumerate(self.runner.rows(len(logits))):
            seeds, i = (request.settings or {}).get("seeds"), request.request_id
            if seeds is None:
                continue
            sample_index = int(i.partition("_")[0]) if len(seeds) > 1 else 0  # "0_id", "1_id", ... of vLLM
            key = i, seeds[sample_index]
            if key not in self.seeded:
                top_p, top_k = request.parameters.top_p, request.parameters.top_k
                support = SamplingConfig(1, top_p=top_p, top_k=top_k if top_k > 0 else None)
                self.seeded[key] = Uniforms(key[1]), support
            stream, support = seeded[key] = self.seeded[key]
            by_support.setdefault(support, []).append((row, stream.at(request.step)))
        self.seeded = seeded
        drawn = []
        for support, members in by_support.items():
            rows, numbers = map(list, zip(*members, strict=True))
            index = _sent(rows, torch.int64, logits.device)
            uniform = _sent(numbers, torch.float64, logits.device)
            drawn.append((index, sample(logits.index_select(0, index), support, uniform)[0]))
        return drawn


class SequenceSampler(SeededSampler):
    """Samples rollouts, which have a place, and writes their log-probs to a record: to return some, vLLM itself would
    rank the whole vocabulary in each step. Other requests, of a server, are sampled as SeededSampler does. What else is
    in the batch changes no bit of a rollout.

    sampling : settings of an engine's run; those of a server come with each request
    """

    def __init__(self, runner: Any, plain: nn.Module, record: RunRecord | None = None) -> None:
        super().__init__(runner, plain)
        self.begin_run(SamplingConfig(1), record)

    def begin_run(self, sampling: SamplingConfig, record: RunRecord | None) -> None:
        self.sampling, self.record = sampling, record
        # request id -> stream and settings, for the rollouts of the previous step
        self.drawing: dict[str, tuple[Uniforms, SamplingConfig]] = {}

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Any]:
        """Sample a token for each request from the model's logits [B, V], and record those of rollouts.

        Returns int64 [B], with NOT_FINITE for rollouts whose log-probs are not finite; and what vLLM's own sampler
        returns beside the tokens, None if it has sampled none.
        """
        rows = self.runner.rows(len(logits))
        ours = [(row, request) for row, request in enumerate(rows) if "place" in (request.settings or {})]
        drawn = self._draw_rollouts(logits, rows, ours) if ours else []  # first: vLLM's sampler writes into the logits
        if len(ours) == len(logits):
            sampled, logprobs = torch.empty(len(logits), dtype=torch.long, device=logits.device), None
        else:
            sampled, logprobs = super().forward(logits, generators, k, p)
        for index, tokens in drawn:
            sampled.index_copy_(0, index, tokens.to(sampled.dtype))
        return sampled, logprobs

    def _draw_rollouts(
        self, logits: Tensor, rows: list[Any], ours: list[tuple[int, Any]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Sample and record the rollouts' tokens. Returns, for the rollouts of each SamplingConfig, (rows, tokens)."""
        drawing, groups = dict[str, tuple[Uniforms, SamplingConfig]](), dict[Any, list[tuple[int, Any]]]()
        for row, request in ours:
            asked, i = request.settings, request.request_id
            drawing[i] = self.drawing.get(i) or (Uniforms(asked["seed"]), _settings(asked, self.sampling))
            groups.setdefault((drawing[i][1], "forced" in asked), []).append((row, request))
        self.drawing, failed, drawn = drawing, self.runner.failed(len(logits)), []
        for (sampling, is_given), members in groups.items():
            index = _sent([row for row, _ in members], torch.int64, logits.device)
            ids, steps, asked = zip(*((r.request_id, r.step, r.settings) for _, r in members), strict=True)
            uniform = None
            if sampling.temperature > 0 and not is_given:
                uniforms = [drawing[i][0].at(n) for i, n in zip(ids, steps, strict=True)]
                uniform = _sent(uniforms, torch.float64, logits.device)
            tokens = [forced_token(n, s.get("forced"), sampling) for n, s in zip(steps, asked, strict=True)]
            forced = _sent(tokens, torch.int64, logits.device) if max(tokens) >= 0 else None
            part = logits if len(members) == len(logits) else logits.index_select(0, index)
            sampled, logprobs, before, *supports = sample(part, sampling, uniform, forced)
            if failed is not None:
                before = before.masked_fill(failed.index_select(0, index), torch.nan)
            drawn.append((index, sampled.masked_fill_(~before.isfinite(), NOT_FINITE)))
            if self.record is not None:
                places = [settings["place"] for settings in asked]
                self.record.draw(list(ids), places, list(steps), torch.stack((logprobs, before), dim=-1))
                for bits in supports:
                    self.record.supports.draw(list(zip(ids, steps, strict=True)), bits)
        if self.record is not None and (routes := self.runner.routes(len(rows))) is not None:
            self.record.route([request.request_id for request in rows], *routes)
        return drawn


def _settings(asked: dict[str, Any], default: SamplingConfig) -> SamplingConfig:
    if (given := asked.get("sampling")) is None:
        return replace(default, forced=tuple(default.forced), stop_token_ids=None)
    return SamplingConfig(**{**given, "max_tokens": 1, "forced": tuple(given["forced"])})


def _sent(numbers: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
