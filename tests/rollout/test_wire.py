"""The bodies of a server of rollouts carry every number unchanged, and anything else is refused in one clear line."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

from rollout import Rollout, SamplingConfig
from rollout.sampling import Request
from rollout.wire import (
    FAR,
    About,
    Answered,
    pack_requests,
    pack_rollouts,
    pack_weights,
    unpack_requests,
    unpack_rollouts,
)
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace
from sparse_rl.trace.support import SupportRecord, packed

SHAPE, VOCABULARY = (3, 2), 70
SAMPLING = SamplingConfig(9, temperature=0.7, top_k=5, min_p=0.1, record_support=True, forced=[4, 5], forced_from=2)


def evictions(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    later = torch.randint(1, 2 * length, (*SHAPE, length), generator=generator)
    return (torch.arange(length) + later).int()


def answered(requests: list[Request]) -> list[Answered]:
    """Return rollouts with all sections that an engine of vLLM records: experts, supports, and a window."""
    answers = []
    for request in requests:
        count = request.max_tokens
        ids, length = request.forced or list(range(count)), len(request.prompt) + count
        record = SupportRecord()
        for step, token in enumerate(ids):
            kept = torch.zeros(1, VOCABULARY, dtype=torch.bool)
            kept[0, [token, 69, 68, 67][: step % 3 + 1]] = True
            record.draw([("key", step)], packed(kept))
        routed = torch.stack([torch.stack([torch.arange(2)] * length).short()] * SHAPE[0])
        routed[:, -1] = -1
        global_layers = EvictionTrace.recorded(evictions(length)[:2], {"routed": routed, **record.take("key", length)})
        trace = global_layers.beside_windows([0, 0, 3])
        logprobs = (-torch.rand(2, count, generator=torch.Generator().manual_seed(count))).tolist()
        reason: Any = "length"
        answers.append(Answered(Rollout(request.prompt, ids, *logprobs, trace, reason), (3, 3)))
    return answers


@pytest.fixture
def asked() -> list[Request]:
    return [Request(i, [1 + i] * n, 2 + i, 2**62 + i) for i, n in enumerate((1, 7, 40))]


def test_requests_arrive_as_they_were_sent(asked: list[Request]) -> None:
    """Given completions too. Of the settings, only what each sequence has of its own is replaced."""
    got = unpack_requests(pack_requests(asked, SAMPLING, [2, 9], 5))
    assert got.requests == asked and got.stop == [2, 9] and got.version == 5
    assert got.sampling == replace(SAMPLING, n=1, seed=0)
    given = [replace(request, forced=[8] * request.max_tokens) for request in asked]
    assert unpack_requests(pack_requests(given, SAMPLING, [], 0)).requests == given


def test_rollouts_arrive_as_they_were_recorded(asked: list[Request]) -> None:
    """All sections, and all bits of the log-probs."""
    sent = answered(asked)
    got = unpack_rollouts(pack_rollouts(sent), asked, SHAPE, VOCABULARY)
    for a, b in zip(sent, got, strict=True):
        fields = vars(a.rollout).keys() - {"trace"}
        assert a.versions == b.versions
        assert all(getattr(a.rollout, name) == getattr(b.rollout, name) for name in fields)
        assert a.rollout.trace.sections.keys() == b.rollout.trace.sections.keys()
        for name, values in a.rollout.trace.sections.items():
            assert values.dtype == b.rollout.trace.sections[name].dtype
            assert torch.equal(values, b.rollout.trace.sections[name])
    assert len(sent[0].rollout.trace.sections) == 6


@pytest.mark.parametrize("length", [FAR - 1, FAR])
def test_positions_of_long_sequences_have_room(length: int) -> None:
    """From 65,535 tokens on, a position could look like NEVER in 16 bits, and 32 are sent."""
    evict_at = torch.full((1, 1, length), NEVER, dtype=torch.int32)
    evict_at[..., :2] = length - 2
    request = Request(0, [1] * (length - 1), 1)
    sent = [Answered(Rollout(request.prompt, [1], [-1.0], [-1.0], EvictionTrace(evict_at), "length"), (0, 0))]
    body = pack_rollouts(sent)
    kind = load(zlib.decompress(load(body)["trace.0"].tobytes()))["evict_at"].dtype
    assert kind == (np.int32 if length == FAR else np.uint16)
    (got,) = unpack_rollouts(body, [request], (1, 1), 2)
    assert torch.equal(got.rollout.trace.evict_at, evict_at)
    assert len(body) < length  # compressed


def header_with(**values: Any) -> Callable[[dict[str, np.ndarray]], None]:
    def change(arrays: dict[str, np.ndarray]) -> None:
        header = json.loads(arrays["header"].tobytes())
        arrays["header"] = np.frombuffer(json.dumps({**header, **values}).encode(), np.uint8)

    return change


def array_with(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda arrays: arrays.update({name: change(arrays[name])})


def bomb(packed_trace: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.compress(bytes(10**7)), np.uint8)


def shifted(packed_trace: np.ndarray) -> np.ndarray:
    """Evict one token before its own position."""
    sections = load(zlib.decompress(packed_trace.tobytes()))
    sections["evict_at"][0, 0, 1] = 0
    return np.frombuffer(zlib.compress(save(sections)), np.uint8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (header_with(format=1), "not an answer with rollouts of format 2, but of 1"),
        (header_with(reasons=["length", "abort", "length"]), "sequence 1 .* ended by 'abort'"),
        (header_with(reasons=["length"]), "must have 3 reasons"),
        (header_with(versions=[[0, 0], [0], [0, 0]]), "sequence 1 .* has the versions"),
        (header_with(sizes=[2**40, 1, 1]), "cannot hold 1099511627776"),
        (header_with(sizes=["1", 1, 1]), "cannot hold '1'"),
        (array_with("ids", lambda ids: ids[:-1]), "lengths do not add up to the 8 of ids"),
        (array_with("ids", lambda ids: ids - 1), "ids has a negative token id"),
        (array_with("ids", lambda ids: ids + 100), "sequence 0 .* has token 101"),
        (array_with("ids", lambda ids: ids.astype(np.int64)), "the body needs ids, int32"),
        (array_with("lengths", lambda lengths: lengths[[1, 0, 2]]), "ended by its length after 3 tokens|has 3 tokens"),
        (array_with("lengths", lambda lengths: lengths[:2]), "lengths has shape"),
        (array_with("logprobs", lambda values: values[1:]), "logprobs has shape"),
        (array_with("logprobs", lambda values: values * np.nan), "not finite"),
        (array_with("trace.1", lambda values: values[:-5]), "trace.1"),
        (array_with("trace.1", bomb), "trace.1"),
        (array_with("trace.1", shifted), "a token can be evicted only after its own position"),
        (lambda arrays: arrays.pop("trace.2"), "the body needs trace.2"),
        (lambda arrays: arrays.pop("header"), "the body is not an answer with rollouts"),
        (lambda arrays: arrays.update({"trace.0": arrays["trace.1"]}), "trace.0"),
    ],
)
def test_a_wrong_answer_is_refused(change: Callable, says: str, asked: list[Request]) -> None:
    body = pack_rollouts(answered(asked))
    unpack_rollouts(body, asked, SHAPE, VOCABULARY)  # control
    arrays = load(body)
    change(arrays)
    with pytest.raises(UserError, match=says):
        unpack_rollouts(save(arrays), asked, SHAPE, VOCABULARY)


def test_a_body_that_is_cut_short_is_refused(asked: list[Request]) -> None:
    """Anywhere, for requests and answers alike."""
    request, answer = pack_requests(asked, SAMPLING, [], 0), pack_rollouts(answered(asked))
    for size in [0, 1, 8, 50, *range(60, min(len(request), len(answer)), 97)]:
        with pytest.raises(UserError, match="the body is not"):
            unpack_requests(request[:size])
        with pytest.raises(UserError, match="the body is not"):
            unpack_rollouts(answer[:size], asked, SHAPE, VOCABULARY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (header_with(version="1"), "version must be of type int"),
        (header_with(stop=[-1]), "not a list of whole numbers"),
        (header_with(sampling={"max_tokens": 1, "temprature": 1}), "temprature"),
        (header_with(sampling={"max_tokens": 1, "top_p": 7}), "top_p"),
        (array_with("max_tokens", lambda values: values * 0), "max_tokens >= 1"),
        (array_with("seeds", lambda values: -values), "a seed >= 0"),
        (array_with("prompt_lengths", lambda values: values + np.array([0, 1, -1])), None),
        (array_with("prompt_lengths", lambda values: values * np.array([0, 1, 1])), "do not add up"),
        (array_with("forced_lengths", lambda values: values[[1, 0, 2]]), "must be its length"),
    ],
)
def test_a_wrong_request_is_refused(change: Callable, says: str | None, asked: list[Request]) -> None:
    """Control: other prompts, but valid ones, are not."""
    given = [replace(request, forced=[8] * request.max_tokens) for request in asked]
    arrays = load(pack_requests(given, SAMPLING, [], 0))
    change(arrays)
    if says is None:
        unpack_requests(save(arrays))
        return
    with pytest.raises(UserError, match=says):
        unpack_requests(save(arrays))


def test_what_cannot_travel_is_refused_by_name(asked: list[Request]) -> None:
    more: Any = object()
    for request, says in (
        (replace(asked[0], context=more), "a compacted context cannot be sent"),
        (replace(asked[0], held=more), "a turn of a conversation cannot be sent"),
        (replace(asked[0], forced=[1, 2]), "either all with a given completion or none"),
    ):
        with pytest.raises(UserError, match=says):
            pack_requests([request, asked[1]], SAMPLING, [], 0)
    (first, *_), trace = answered(asked), EvictionTrace.dense(*SHAPE, 3)
    spans = Rollout([1], [2, 3], [0.0, -1.0], [0.0, -1.0], trace, "length", [(1, 2)])
    with pytest.raises(UserError, match="its spans do not travel"):
        pack_rollouts([first, Answered(spans, (0, 0))])


def test_a_server_tells_what_it_is() -> None:
    sizes = {"vocabulary": 70, "layers": 3, "kv_heads": 2, "version": 4, "max_batch": 8, "max_model_len": 64}
    about = About(policy="{}", model="qwen3", weights="0", dtype="float32", exact=True, **sizes)
    assert About.of(json.loads(json.dumps(asdict(about)))) == about
    for wrong in (None, {}, {**asdict(about), "version": "4"}):
        with pytest.raises(UserError, match="GET /rollouts"):
            About.of(wrong)


def test_weights_are_a_plain_file() -> None:
    weight = torch.randn(4, 6).T  # not contiguous
    assert np.array_equal(load(pack_weights([("a", weight)]))["a"], weight.numpy())
