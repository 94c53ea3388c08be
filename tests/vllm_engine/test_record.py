"""A worker returns the record of each request exactly once, and completely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparse_rl.trace import NEVER
from sparse_rl.trace.support import packed

LAYERS, HEADS = 2, 2


@pytest.fixture
def record() -> Any:
    """Return the records of "a-1" (number 7; 6 tokens, 3 sampled) and "b-1" (number 3; 5 tokens, 2 sampled)."""
    from rollout.vllm.sampling import RunRecord

    run_record = RunRecord()
    for request_id in ("a-1", "b-1"):
        run_record.begin(request_id)
    draw(run_record, {"a-1": 0, "b-1": 0}, -1.0)  # replaced below: the prefill of both requests was not complete
    draw(run_record, {"a-1": 0, "b-1": 0}, -2.0)
    drop(run_record, {"a-1": 4}, [[0], [1], [2], [3]])
    draw(run_record, {"a-1": 1, "b-1": 1}, -3.0)
    drop(run_record, {"a-1": 5, "b-1": 4}, [[1, 2], [0, 2], [0, 1], [0, 1]])
    draw(run_record, {"a-1": 2}, -4.0)
    return run_record


def draw(record: Any, steps: dict[str, int], logprob: float) -> None:
    places = [{"a-1": 7, "b-1": 3}[request_id] for request_id in steps]
    values = torch.tensor([[logprob, logprob - 0.5]]) - torch.tensor(places)[:, None] / 8
    record.draw(list(steps), places, list(steps.values()), values)


def drop(record: Any, at: dict[str, int], entries: list[list[int]]) -> None:
    """Record evictions. `entries` lists, for (layer 0 head 0), (0, 1), (1, 0), (1, 1), the entry of each request."""
    positions = torch.tensor(entries).view(LAYERS, HEADS, len(at)).permute(2, 0, 1)
    record.evict(torch.tensor([record.numbers[r] for r in at]), torch.tensor(list(at.values())), positions)


def evict_at(result: Any, length: int) -> list:
    return np.frombuffer(result["evict_at"], np.int32).reshape(LAYERS, HEADS, length).tolist()


def logprobs(result: Any) -> list:
    return np.frombuffer(result["logprobs"], np.float32).reshape(-1, 2).tolist()


def test_evictions_and_log_probs_of_a_request_are_returned_together(record: Any) -> None:
    """In the order of the requested numbers. A step that was sampled again counts once, with its last log-probs."""
    b, a = record.take({3: 5, 7: 6})
    assert evict_at(a, 6) == [
        [[4, 5, NEVER, NEVER, NEVER, NEVER], [5, 4, NEVER, NEVER, NEVER, NEVER]],
        [[5, NEVER, 4, NEVER, NEVER, NEVER], [5, NEVER, NEVER, 4, NEVER, NEVER]],
    ]
    assert evict_at(b, 5)[0] == [[NEVER, NEVER, 4, NEVER, NEVER]] * 2
    assert evict_at(b, 5)[1] == [[NEVER, 4, NEVER, NEVER, NEVER]] * 2
    assert logprobs(a) == [[v - 0.875, v - 1.375] for v in (-2.0, -3.0, -4.0)]
    assert logprobs(b) == [[v - 0.375, v - 0.875] for v in (-2.0, -3.0)]


def test_evictions_are_fetched_before_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "a-1" is compacted once and later drops one token of each head in each of 170 steps; "b-1" drops none."""
    from rollout.vllm import sampling
    from rollout.vllm.sampling import RunRecord

    monkeypatch.setattr(sampling, "HELD", 64 * LAYERS * 2 * HEADS)
    run_record, expected = RunRecord(), np.full((LAYERS, HEADS, 300), NEVER)
    numbers = torch.tensor([run_record.begin("b-1"), run_record.begin("a-1")])
    draw(run_record, {"a-1": 0, "b-1": 0}, -1.0)
    drop(run_record, {"a-1": 40}, [[0], [1], [2], [3]])
    for head, token in enumerate((0, 1, 2, 3)):
        expected[head // 2, head % 2, token] = 40
    for step in range(200):
        dropped = torch.full((LAYERS, 2, HEADS), -1)
        if step >= 30:
            for head in range(4):
                dropped[head // 2, 1, head % 2] = 10 + step + head
                expected[head // 2, head % 2, 10 + step + head] = 50 + step
        run_record.evict(numbers, torch.tensor([45 + step, 50 + step]), dropped.transpose(0, 1))
        assert len(run_record._evicted) <= 64
    assert len(run_record._fetched) == 3
    a, b = run_record.take({7: 300, 3: 290})
    assert evict_at(a, 300) == expected.tolist()
    assert b["evict_at"] is None


def test_the_record_of_a_request_is_removed_when_it_is_taken(record: Any) -> None:
    """Both are complete, and nothing remains."""
    (a,) = record.take({7: 6})
    (b,) = record.take({3: 5})
    assert len(logprobs(a)) == 3
    assert len(logprobs(b)) == 2
    assert a["evict_at"]
    assert b["evict_at"]
    assert not record.drawn
    assert not record.dropped
    assert not record._logprobs
    assert not record._evicted
    assert not record._fetched


def test_requests_may_drop_different_numbers_of_entries(record: Any) -> None:
    """ "a-1" drops one and "b-1" two; two steps later "a-1" drops three."""
    # entries dropped from (layer 0 head 0), (0, 1), (1, 0), (1, 1)
    a, b = [[3], [4], [3], [5]], [[3, 4], [1, 3], [2, 4], [0, 4]]
    later = [[6, 7, 8], [5, 6, 7], [8, 6, 5], [6, 7, 8]]
    padded = [[*heads, -1] for heads in a]
    together = torch.cat([torch.tensor(padded).T, torch.tensor(b).T])
    for numbers, at, entries in (
        ([0, 0, 1, 1], [7, 7, 8, 8], together),
        ([0] * 3, [9] * 3, torch.tensor(later).T),
    ):
        record.evict(torch.tensor(numbers), torch.tensor(at), entries.view(-1, LAYERS, HEADS))
    results = zip(record.take({7: 10, 3: 9}), (10, 9), strict=True)
    heads_of_a, heads_of_b = (
        [head for layer in evict_at(result, length) for head in layer] for result, length in results
    )
    for head in range(LAYERS * HEADS):
        assert [t for t, at in enumerate(heads_of_a[head]) if at == 7] == a[head]
        assert [t for t, at in enumerate(heads_of_a[head]) if at == 9] == sorted(later[head])
        assert [t for t, at in enumerate(heads_of_b[head]) if at == 8] == b[head]


def test_an_eviction_in_the_last_step_of_a_request_is_recorded(record: Any) -> None:
    drop(record, {"b-1": 5}, [[3], [3], [3], [3]])
    # the eviction can be seen in a longer sequence, and under a policy that evicts before it attends
    (b,) = record.take({3: 6})
    assert [head[3] for layer in evict_at(b, 6) for head in layer] == [5] * 4


def test_a_request_without_a_compaction_has_no_evictions() -> None:
    from rollout.vllm.sampling import RunRecord

    record = RunRecord()
    draw(record, {"a-1": 0}, -1.0)  # with a full cache no request is reported to begin
    (a,) = record.take({7: 4})
    assert a["evict_at"] is None
    assert len(logprobs(a)) == 1


@pytest.mark.parametrize(
    "counts", [[1] * 60, [17, 8, 8, 8, 8], [40], [5, 1, 1, 0, 12]], ids=["one at a time", "prompt", "once", "mixed"]
)
def test_evictions_are_written_at_the_positions_of_their_entries(counts: list[int]) -> None:
    """As a plain loop writes them, for arrays in the memory orders that `drop` and `arrive` give."""
    from rollout.vllm.sampling import Dropped, _evict_at

    layers, heads, length = 3, 2, 70
    chosen = np.argsort(np.random.default_rng(0).random((layers, heads, length)), axis=-1).astype(np.int32)
    dropped, expected, start = [], np.full((layers, heads, length), NEVER), 0
    for number, count in enumerate(counts):
        piece, at = chosen[..., start : start + count], np.arange(count) + 100 * number
        if number % 2:
            piece = np.ascontiguousarray(piece.transpose(0, 2, 1)).transpose(0, 2, 1)
        dropped.append(Dropped(at, piece.transpose(2, 0, 1)))
        np.put_along_axis(expected, piece.astype(np.int64), at[None, None], axis=-1)
        start += count
    computed = _evict_at(dropped, length)
    assert computed.dtype == np.int32
    assert computed.tobytes() == expected.astype(np.int32).tobytes()
    assert (computed == NEVER).sum() == layers * heads * (length - sum(counts))


def test_supports_are_returned_with_their_request() -> None:
    """A step that was sampled again counts once, with its last support. Control: nothing is recorded, or returned."""
    from rollout.vllm.sampling import RunRecord

    run_record = RunRecord()
    for step, kept in ((0, [1, 2]), (0, [3]), (1, [0, 39]), (2, [5, 6, 7])):
        draw(run_record, {"a-1": step}, -1.0)
        bits = packed(torch.zeros(1, 40).bool().index_fill_(1, torch.tensor(kept), True))  # W is 2
        run_record.supports.draw([("a-1", step)], bits)
    draw(run_record, {"b-1": 0}, -1.0)
    a, b = run_record.take({7: 6, 3: 4})
    values = {name: np.frombuffer(x, np.int32).reshape(shape).tolist() for name, (x, shape) in a["supports"].items()}
    bits = [[1 << 5 | 1 << 6 | 1 << 7, 0]]
    assert values == {"support_sizes": [0, 0, 0, 1, 2, 3], "support": [3, 0, 39], "support_bits": bits}
    assert b["supports"] == {}


def test_the_experts_of_each_token_are_recorded_at_its_position() -> None:
    """Experts computed again replace earlier ones; the last token has none. The record is fetched before memory is
    full."""
    from rollout.vllm.sampling import STEPS, RunRecord

    record, length = RunRecord(), 2 * STEPS + 10
    generator, captured = torch.Generator().manual_seed(0), torch.zeros(40, 2, 3, dtype=torch.int16)
    expected = {name: np.full((length, 2, 3), -1, np.int16) for name in ("a-1", "b-1")}

    def step(first: dict[str, int], counts: dict[str, int]) -> None:
        total = sum(counts.values())
        captured[:total] = torch.randint(0, 8, (total, 2, 3), generator=generator, dtype=torch.int16)
        start = 0
        for name, count in counts.items():
            expected[name][first[name] : first[name] + count] = captured[start : start + count].numpy()
            start += count
        positions, sizes = np.array([first[name] for name in counts]), np.array(list(counts.values()))
        record.route(list(counts), positions, sizes, captured[:total])

    step({"a-1": 0, "b-1": 0}, {"a-1": 20, "b-1": 5})
    step({"a-1": 0, "b-1": 5}, {"a-1": 9, "b-1": 1})  # a-1 is prefilled again
    for position in range(20, length - 1):
        step({"a-1": position, "b-1": position - 14}, {"a-1": 1, "b-1": 1})
        assert len(record._routed) < STEPS
    for place, name in enumerate(expected):
        record.draw([name], [place], [0], torch.zeros(1, 2))
    for name, result in zip(expected, record.take({0: length, 1: length}), strict=True):
        experts = np.frombuffer(result["routed"], np.int16).reshape(length, 2, 3)
        assert (experts == expected[name]).all()
        assert (experts[-1] == -1).all()
    dense = RunRecord()
    dense.draw(["c-1"], [2], [0], torch.zeros(1, 2))
    assert dense.take({2: 4})[0]["routed"] is None
