"""The messages between a client of rollouts and a server (`sparse-rl serve --rollouts`).

A body is one safetensors file, so nothing is unpickled. Its tensor `header` is a JSON object, as uint8 [bytes].
Sequences of different lengths are joined in one tensor, whose lengths are in a second one, int64 [n].

    GET /rollouts     answer: a JSON object, see `About`
    POST /rollouts    n sequences, see `pack_requests`; answer, when all are done, in their order: `pack_rollouts`
    POST /rollouts/weights?version=N
                      all weights of the model and its scorers under the names of transformers' module, a plain
                      safetensors file (`pack_weights`); answer, when no sequence runs any more: {"version": N}
    POST /rollouts/weights?version=N&file=/proc/PID/fd/FD
                      the same in a file of a client on this machine; if the server cannot read it, it answers at
                      once with the version that it has
    an error          {"error": {"message": text, "type": text, "code": status}} with status 400 (a wrong body),
                      401 (no key), 409 (the server has other weights than `version`), 500 (a log-prob is not finite),
                      503 (a sequence was aborted, or preempted too often)

A request:

    header            {"format": 2, "version": of the weights, "sampling": SamplingConfig, "stop": ids of stop tokens}
    prompts           int32, prompt_lengths int64 [n]
    seeds             int64 [n], the sequences' own seeds
    max_tokens        int64 [n]
    forced            int32, forced_lengths int64 [n]; only if the completions are given (`Engine.simulate`)

An answer:

    header            {"format": 2, "reasons": [n], "versions": [n] of [first, last], "sizes": [n] of bytes}
    ids               int32, lengths int64 [n]
    logprobs          float32 [all tokens, 2]: of the sampling distribution, and before its truncation
    trace.I           uint8 [bytes], the trace of sequence I: a safetensors file of its sections, compressed by zlib,
                      with `sizes` bytes

evict_at of a sequence with fewer than FAR tokens is sent as uint16, with FAR for NEVER; else unchanged, as int32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from safetensors.torch import save as save_tensors
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.engine import Rollout
from rollout.sampling import Request
from sparse_rl.config import Configuration, Source, as_mapping, build
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace

FORMAT = 2
LOOPBACK = ("localhost", "127.0.0.1", "::1")
FAR = 2**16 - 1  # NEVER in uint16
LEVEL = 1  # of zlib
MOST_RATIO = 1100  # zlib makes at most 1,032 bytes of one
EVICT_AT = "evict_at"


@dataclass(frozen=True, kw_only=True)
class About(Configuration):
    """The description that a server of rollouts gives of itself.

    policy : fingerprint of the policy (sparse_rl/policies/make.py)
    model : fingerprint of the model's configuration: family, shape, and a hash (`model_fingerprint`)
    weights : fingerprint of the weights with which the server began (`identify`); empty if unknown
    vocabulary, layers, kv_heads : sizes of the model
    dtype, exact : as in RolloutConfig
    version : of the weights; 0 for those with which the server began, -1 if an update of them was cut off
    max_batch : maximum number of sequences that are sampled at the same time
    max_model_len : maximum length of prompt and completion
    running, waiting : numbers of sequences in the engine, and of those that wait for their version
    requests : number of open requests for rollouts, each until its answer is sent
    silent : seconds in which the workers have not answered, although sequences run
    recorded : number of records that the workers keep; 0 if no sequence is sampled
    scorers : digests of the policy's scorers, as in `Engine.scorer_digests`
    """

    policy: str
    model: str
    weights: str
    vocabulary: int
    layers: int
    kv_heads: int
    dtype: str
    exact: bool
    version: int
    max_batch: int
    max_model_len: int
    running: int = 0
    waiting: int = 0
    requests: int = 0
    silent: float = 0.0
    recorded: int = 0
    scorers: dict[str, list[str]] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def of(cls, answer: Any) -> About:
        """Return what a server has answered. Raises UserError for anything else."""
        return build(cls, answer if isinstance(answer, dict) else {}, "", Source("GET /rollouts"))


@dataclass(frozen=True)
class Asked:
    """The sequences of one request to a server. version : of the weights to sample them with; stop : stop tokens"""

    requests: list[Request]
    sampling: SamplingConfig
    stop: list[int]
    version: int


@dataclass(frozen=True)
class Answered:
    """A sequence that a server has sampled. versions : of the weights of its prefill, and of its last token"""

    rollout: Rollout
    versions: tuple[int, int]


# ---- requests -------------------------------------------------------------------------------------------------------


def pack_requests(requests: Sequence[Request], sampling: SamplingConfig, stop: Sequence[int], version: int) -> bytes:
    """Return the body that asks for sequences. Raises UserError for requests that cannot travel.

    sampling : of all of them; their own seeds and max_tokens take the place of its `seed`, `n` and `max_tokens`
    stop : ids of the tokens that end a completion
    """
    for request in requests:
        if request.context is not None:
            raise UserError("a compacted context cannot be sent to a server of rollouts; use the engine vllm or hf")
        if request.held is not None or type(request) is not Request:
            raise UserError(
                "a turn of a conversation cannot be sent to a server of rollouts; use the engine vllm or hf"
            )
    if len(given := {request.forced is not None for request in requests}) != 1:
        raise UserError("a request to a server needs sequences, either all with a given completion or none")
    settings = as_mapping(replace(sampling, n=1, seed=0, stop_token_ids=None))
    header = {"version": version, "sampling": settings, "stop": list(stop)}
    arrays = _joined("prompts", "prompt_lengths", [request.prompt for request in requests])
    arrays["seeds"] = np.array([request.seed for request in requests], np.int64)
    arrays["max_tokens"] = np.array([request.max_tokens for request in requests], np.int64)
    if given == {True}:
        arrays |= _joined("forced", "forced_lengths", [request.forced or [] for request in requests])
    return _pack(header, arrays)


def unpack_requests(body: bytes) -> Asked:
    """Return what `pack_requests` has packed; a request's place is its index. Raises UserError for another body."""
    header, arrays = _unpack(body, "a request for rollouts")
    prompts = _apart(arrays, "prompts", "prompt_lengths")
    count = len(prompts)
    seeds, most = (_array(arrays, name, np.int64, (count,)).tolist() for name in ("seeds", "max_tokens"))
    forced: Sequence[list[int] | None] = [None] * count
    if "forced" in arrays:
        forced = _apart(arrays, "forced", "forced_lengths", count)
    if not count or min(map(len, prompts)) < 1 or min(most) < 1 or min(seeds) < 0:
        raise UserError("a request for rollouts needs sequences, each with a prompt, max_tokens >= 1 and a seed >= 0")
    if any(given is not None and len(given) != limit for given, limit in zip(forced, most, strict=True)):
        raise UserError("max_tokens of a given completion must be its length")
    settings, version = _value(header, "sampling", dict), _value(header, "version", int)
    sampling = build(SamplingConfig, {**settings, "stop_token_ids": None}, "sampling", Source("the request"))
    _ids([*sampling.forced] if isinstance(sampling.forced, (list, tuple)) else sampling.forced)
    if version < 0:
        raise UserError(f"header: the version {version} is below 0")
    rows = zip(prompts, most, seeds, forced, strict=True)
    requests = [Request(i, prompt, limit, seed, given) for i, (prompt, limit, seed, given) in enumerate(rows)]
    return Asked(requests, sampling, _ids(_value(header, "stop", list)), version)


# ---- answers --------------------------------------------------------------------------------------------------------


def pack_rollouts(answered: Sequence[Answered]) -> bytes:
    """Return the body that answers a request. Raises UserError for a rollout that cannot travel: a conversation."""
    rollouts = [one.rollout for one in answered]
    if any(rollout.spans for rollout in rollouts):
        raise UserError("a conversation cannot be answered: its spans do not travel")
    arrays = _joined("ids", "lengths", [rollout.completion_ids for rollout in rollouts])
    pairs = [np.array([rollout.logprobs, rollout.model_logprobs], np.float32).T for rollout in rollouts]
    arrays["logprobs"] = np.ascontiguousarray(np.concatenate(pairs))
    sizes = []
    for i, rollout in enumerate(rollouts):
        trace = save({name: _shrunk(name, values) for name, values in rollout.trace.sections.items()})
        arrays[f"trace.{i}"] = np.frombuffer(zlib.compress(trace, LEVEL), np.uint8)
        sizes.append(len(trace))
    versions = [list(one.versions) for one in answered]
    reasons = [rollout.finish_reason for rollout in rollouts]
    return _pack({"reasons": reasons, "versions": versions, "sizes": sizes}, arrays)


def unpack_rollouts(
    body: bytes, requests: Sequence[Request], shape: tuple[int, int], vocabulary: int
) -> list[Answered]:
    """Return the answers to requests, in their order. Raises UserError if the body cannot be the answer to them.

    shape : number of layers with keys and values, and of kv heads in each
    """
    header, arrays = _unpack(body, "an answer with rollouts")
    completions = _apart(arrays, "ids", "lengths", len(requests))
    pairs = _array(arrays, "logprobs", np.float32, (sum(map(len, completions)), 2))
    if not np.isfinite(pairs[:, 1]).all() or np.isnan(pairs[:, 0]).any():
        raise UserError("an answer with rollouts has a log-prob that is not finite")
    by_sequence = np.split(pairs, np.cumsum([len(ids) for ids in completions])[:-1])
    columns = [_value(header, name, list) for name in ("reasons", "versions", "sizes")]
    if any(len(column) != len(requests) for column in columns):
        raise UserError(f"an answer with rollouts must have {len(requests)} reasons, versions and sizes")
    answers = []
    rows = zip(requests, completions, by_sequence, *columns, strict=True)
    for i, (request, ids, logprobs, finish_reason, versions, size) in enumerate(rows):
        wrong = f"sequence {i} of an answer with rollouts"
        if finish_reason not in ("stop", "length"):
            raise UserError(f"{wrong} ended by {finish_reason!r}, not by a stop token or its length")
        if not 1 <= len(ids) <= request.max_tokens or (request.forced is not None and ids != request.forced):
            raise UserError(f"{wrong} has {len(ids)} tokens, of at most {request.max_tokens}, or not the given ones")
        if max(ids) >= vocabulary:
            raise UserError(f"{wrong} has token {max(ids)}; the model's token ids are 0 to {vocabulary - 1}")
        if finish_reason == "length" and len(ids) != request.max_tokens:
            raise UserError(f"{wrong} ended by its length after {len(ids)} tokens of {request.max_tokens}")
        if len(seen := _ids(versions)) != 2:
            raise UserError(f"{wrong} has the versions {versions!r}, not a first and a last one")
        trace = _trace(arrays, i, size, (*shape, len(request.prompt) + len(ids)))
        drawn, before = logprobs.T.tolist()
        answers.append(Answered(Rollout(request.prompt, ids, drawn, before, trace, finish_reason), (seen[0], seen[1])))
    return answers


def _shrunk(name: str, values: Tensor) -> np.ndarray:
    array = values.contiguous().numpy()
    if name == EVICT_AT and array.shape[-1] < FAR:
        return np.where(array == NEVER, FAR, array).astype(np.uint16)
    return array


def _trace(arrays: Mapping[str, np.ndarray], i: int, size: Any, shape: tuple[int, ...]) -> EvictionTrace:
    """Return a trace. Its number of bytes is checked before any memory is taken for them."""
    packed = _array(arrays, name := f"trace.{i}", np.uint8, (None,)).tobytes()
    if type(size) is not int or not 0 < size <= MOST_RATIO * len(packed):
        raise UserError(f"{name}: {len(packed)} bytes cannot hold {size!r}")
    inflate = zlib.decompressobj()
    try:
        sections = load(inflate.decompress(packed, size + 1))
        complete = inflate.eof and not inflate.unused_data
    except Exception as error:  # zlib and safetensors raise several kinds
        raise UserError(f"{name} is damaged: {error}") from error
    if not complete or EVICT_AT not in sections or sections[EVICT_AT].shape != shape:
        raise UserError(f"{name} has no {EVICT_AT} of shape {[*shape]}, or more than {size} bytes")
    if (values := sections[EVICT_AT]).dtype == np.uint16:
        sections[EVICT_AT] = np.where(values == FAR, NEVER, values.astype(np.int32)).astype(np.int32)
    return EvictionTrace.from_state({name: torch.from_numpy(values) for name, values in sections.items()})


# ---- weights --------------------------------------------------------------------------------------------------------


def pack_weights(weights: Iterable[tuple[str, Tensor]], version: int = 0) -> bytes:
    """Return the body that replaces all weights. weights : (name in transformers' module, tensor on any device)"""
    tensors = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights}
    return save_tensors(tensors, {"version": str(version)})


# ---- bodies ---------------------------------------------------------------------------------------------------------


def _pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    text = json.dumps({"format": FORMAT, **header}).encode()
    return save({"header": np.frombuffer(text, np.uint8), **arrays})


def _unpack(body: bytes, what: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        arrays = load(body)
        header = json.loads(arrays.pop("header").tobytes())
    except Exception as error:  # safetensors and json raise many kinds for damage
        raise UserError(f"the body is not {what} (cut short, or of another kind): {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        theirs = header.get("format") if isinstance(header, dict) else header
        raise UserError(f"the body is not {what} of format {FORMAT}, but of {theirs!r}; install the same version")
    return header, arrays


def _value(header: Mapping[str, Any], name: str, kind: type) -> Any:
    value = header.get(name)
    if type(value) is not kind:
        raise UserError(f"header: {name} must be of type {kind.__name__}, got {value!r}")
    return value


def _ids(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise UserError(f"header: {values!r} is not a list of whole numbers >= 0")
    return values


def _array(arrays: Mapping[str, np.ndarray], name: str, dtype: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """Return an array of the body; None in `shape` stands for any size."""
    array = arrays.get(name)
    if array is None or array.dtype != dtype or array.ndim != len(shape):
        raise UserError(f"the body needs {name}, {np.dtype(dtype).name} with {len(shape)} axes")
    if any(wanted not in (None, size) for wanted, size in zip(shape, array.shape, strict=True)):
        raise UserError(f"{name} has shape {[*array.shape]}, not {[*shape]}")
    return array


def _joined(values: str, lengths: str, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    joined = np.array([token for row in rows for token in row], np.int32)
    return {values: joined, lengths: np.array([len(row) for row in rows], np.int64)}


def _apart(arrays: Mapping[str, np.ndarray], values: str, lengths: str, count: int | None = None) -> list[list[int]]:
    counts = _array(arrays, lengths, np.int64, (count,))
    joined = _array(arrays, values, np.int32, (None,))
    if (counts < 0).any() or sum(counts.tolist()) != len(joined):
        raise UserError(f"{lengths} do not add up to the {len(joined)} of {values}")
    if (joined < 0).any():
        raise UserError(f"{values} has a negative token id")
    return [part.tolist() for part in np.split(joined, np.cumsum(counts)[:-1])] if len(counts) else []
