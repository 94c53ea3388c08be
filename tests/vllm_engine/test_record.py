"""The records of a worker: the record of each request is handed over exactly once, in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sparse_rl.trace import NEVER

LAYERS, HEADS = 2, 2


@pytest.fixture
def record() -> Any:
    """The record of request "a-1" with number 7 and 6 tokens, 3 of them sampled, and of "b-1" with number 3 and 5
    tokens, 2 of them sampled.
    """
    from rollout.vllm.record import RunRecord

    made = RunRecord()
    for request_id in ("a-1", "b-1"):
        made.begin(request_id)
    draw(made, {"a-1": 0, "b-1": 0}, -1.0)  # void, since the prefill of both requests is not complete
    draw(made, {"a-1": 0, "b-1": 0}, -2.0)
    drop(made, {"a-1": 4}, [[0], [1], [2], [3]])
    draw(made, {"a-1": 1, "b-1": 1}, -3.0)
    drop(made, {"a-1": 5, "b-1": 4}, [[1, 2], [0, 2], [0, 1], [0, 1]])
    draw(made, {"a-1": 2}, -4.0)
    return made


def draw(record: Any, steps: dict[str, int], logprob: float) -> None:
    places = [{"a-1": 7, "b-1": 3}[request_id] for request_id in steps]
    values = torch.tensor([[logprob, logprob - 0.5]]) - torch.tensor(places)[:, None] / 8
    record.draw(list(steps), places, list(steps.values()), values)


def drop(record: Any, at: dict[str, int], each: list[list[int]]) -> None:
    """Record evictions. `each` lists, for (layer 0 head 0), (0, 1), (1, 0), (1, 1), the entry that
    each request drops.
    """
    positions = np.array(each, np.int32).reshape(LAYERS, HEADS, len(at)).transpose(0, 2, 1).reshape(LAYERS, -1)
    record.drop(list(at), list(at.values()), [1] * len(at), positions)


def evict_at(result: Any, length: int) -> list:
    return np.frombuffer(result["evict_at"], np.int32).reshape(LAYERS, HEADS, length).tolist()


def logprobs(result: Any) -> list:
    return np.frombuffer(result["logprobs"], np.float32).reshape(-1, 2).tolist()


def test_evictions_and_log_probs_leave_together(record: Any) -> None:
    """Evictions and log-probs of a request are returned together, in the order of the requested numbers. A step that
    was sampled again counts once, with its last log-probs.
    """
    b, a = record.take({3: 5, 7: 6})
    assert not a["preempted"] and not b["preempted"]
    assert evict_at(a, 6) == [
        [[4, 5, NEVER, NEVER, NEVER, NEVER], [5, 4, NEVER, NEVER, NEVER, NEVER]],
        [[5, NEVER, 4, NEVER, NEVER, NEVER], [5, NEVER, NEVER, 4, NEVER, NEVER]],
    ]
    assert evict_at(b, 5)[0] == [[NEVER, NEVER, 4, NEVER, NEVER]] * 2
    assert evict_at(b, 5)[1] == [[NEVER, 4, NEVER, NEVER, NEVER]] * 2
    assert logprobs(a) == [[v - 0.875, v - 1.375] for v in (-2.0, -3.0, -4.0)]
    assert logprobs(b) == [[v - 0.375, v - 0.875] for v in (-2.0, -3.0)]


def test_evictions_leave_the_device_before_the_buffer_is_full() -> None:
    """Evictions leave the device before the buffer is full: two requests drop one token each in 200 steps, one of them
    nothing at first, and a compaction comes before.
    """
    from rollout.vllm.record import STEPS, RunRecord

    made, wanted = RunRecord(), np.full((LAYERS, HEADS, 300), NEVER)
    numbers = torch.tensor([made.begin("b-1"), made.begin("a-1")])
    draw(made, {"a-1": 0, "b-1": 0}, -1.0)
    drop(made, {"a-1": 40}, [[0], [1], [2], [3]])
    for head, token in enumerate((0, 1, 2, 3)):
        wanted[head // 2, head % 2, token] = 40
    for step in range(200):
        dropped = torch.full((LAYERS, 2, HEADS), -1)
        if step >= 30:
            for head in range(4):
                dropped[head // 2, 1, head % 2] = 10 + step + head
                wanted[head // 2, head % 2, 10 + step + head] = 50 + step
        made.arrive(numbers, torch.tensor([45 + step, 50 + step]), dropped)
        assert len(made._arrived) < STEPS
    a, b = made.take({7: 300, 3: 290})
    assert evict_at(a, 300) == wanted.tolist() and b["evict_at"] is None


def test_taking_in_parts_equals_at_once_and_empties_the_record(record: Any) -> None:
    (a,) = record.take({7: 6})
    (b,) = record.take({3: 5})
    assert len(logprobs(a)) == 3 and len(logprobs(b)) == 2 and a["evict_at"] and b["evict_at"]
    assert not record.drawn and not record.dropped and not record._logprobs and not record._fetched


def test_requests_may_drop_different_counts(record: Any) -> None:
    """Requests may drop different numbers of entries per head: "a-1" drops one, "b-1" two, and two steps later "a-1"
    three.
    """
    # entries dropped from (layer 0 head 0), (0, 1), (1, 0), (1, 1)
    a, b = [[3], [4], [3], [5]], [[3, 4], [1, 3], [2, 4], [0, 4]]
    rows = [[*a[i], *a[i + 1], *b[i], *b[i + 1]] for i in (0, 2)]
    record.drop(["a-1", "b-1"], [7, 8], [1, 2], np.array(rows, np.int32))
    further = [[6, 7, 8], [5, 6, 7], [8, 6, 5], [6, 7, 8]]
    record.drop(["a-1"], [9], [3], np.array([further[0] + further[1], further[2] + further[3]], np.int32))
    results = zip(record.take({7: 10, 3: 9}), (10, 9), strict=True)
    ours, theirs = ([head for layer in evict_at(result, length) for head in layer] for result, length in results)
    for head in range(LAYERS * HEADS):
        assert [t for t, at in enumerate(ours[head]) if at == 7] == a[head]
        assert [t for t, at in enumerate(ours[head]) if at == 9] == sorted(further[head])
        assert [t for t, at in enumerate(theirs[head]) if at == 8] == b[head]


def test_an_eviction_of_the_last_step_is_there(record: Any) -> None:
    """No eviction is lost if the request ends with the same step that compacts it."""
    drop(record, {"b-1": 5}, [[3], [3], [3], [3]])
    # the eviction is visible under a policy that decides before it attends, in a longer sequence
    (b,) = record.take({3: 6})
    assert [head[3] for layer in evict_at(b, 6) for head in layer] == [5] * 4


def test_a_request_that_begins_again_was_preempted(record: Any) -> None:
    """A request that begins again counts as preempted: its recorded evictions are discarded, and the record of the
    other request is unchanged.
    """
    record.begin("a-1")
    a, b = record.take({7: 6, 3: 5})
    assert a["preempted"] and a["evict_at"] is None
    assert not b["preempted"] and b["evict_at"] is not None


def test_without_a_compaction_there_are_no_evictions() -> None:
    from rollout.vllm.record import RunRecord

    record = RunRecord()
    draw(record, {"a-1": 0}, -1.0)  # with a full cache no request is reported to begin
    (a,) = record.take({7: 4})
    assert a["evict_at"] is None and not a["preempted"] and len(logprobs(a)) == 1


@pytest.mark.parametrize(
    "counts", [[1] * 60, [17, 8, 8, 8, 8], [40], [5, 1, 1, 0, 12]], ids=["one at a time", "prompt", "once", "mixed"]
)
def test_evictions_are_written_at_the_positions_of_their_entries(counts: list[int]) -> None:
    """Evictions are written at the positions of their entries, as by a plain loop, for pieces that lie in memory as
    `drop` and `arrive` leave them.
    """
    from rollout.vllm.record import Dropped, _evict_at

    layers, heads, length = 3, 2, 70
    chosen = np.argsort(np.random.default_rng(0).random((layers, heads, length)), axis=-1).astype(np.int32)
    dropped, wanted, start = [], np.full((layers, heads, length), NEVER), 0
    for number, count in enumerate(counts):
        piece, at = chosen[..., start : start + count], np.arange(count) + 100 * number
        if number % 2:
            piece = np.ascontiguousarray(piece.transpose(0, 2, 1)).transpose(0, 2, 1)
        dropped.append(Dropped(at, piece.transpose(2, 0, 1)))
        np.put_along_axis(wanted, piece.astype(np.int64), at[None, None], axis=-1)
        start += count
    computed = _evict_at(dropped, length)
    assert computed.dtype == np.int32 and computed.tobytes() == wanted.astype(np.int32).tobytes()
    assert (computed == NEVER).sum() == layers * heads * (length - sum(counts))
