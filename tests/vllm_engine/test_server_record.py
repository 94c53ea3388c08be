"""The record of a server is that of a run, for each rollout, whatever comes and goes beside it, and keeps nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout import SamplingConfig
from rollout.sampling import Uniforms, sample

LAYERS, HEADS, VOCABULARY, K = 2, 2, 40, 2


def sizes(record: Any) -> dict[str, int]:
    return {name: len(value) for name, value in vars(record).items() if isinstance(value, (dict, list))}


def test_rollouts_that_come_and_go_have_the_record_of_a_run() -> None:
    """Places are given out again at once. A tenth is aborted, some before they draw; another client's requests run
    beside them. Control: the records of two places differ.
    """
    pytest.importorskip("vllm")
    from rollout.vllm.sampling import RunRecord, ServerRecord

    draw, server = random.Random(0), ServerRecord()
    at_start = sizes(server)
    running: dict[str, Any] = {}  # request id -> its place, its own record, and its length so far
    free, results = list(range(6)), []
    for number in range(60):
        server.version = number // 20
        if free:
            place, name = free.pop(), f"request-{number}"
            server.admit(name, place)
            own = RunRecord()
            own.begin("holder")  # so that the numbers of the two records differ
            running[name] = SimpleNamespace(place=place, own=own, length=3, first=server.version)
            running[name].numbers = [server.begin(name), own.begin(name)]
        assert server.begin("another client's") == 0
        names = [name for name in running if draw.random() < 0.8]
        values = torch.randn(len(names) + 1, 2)
        dropped = torch.randint(0, 3, (len(names) + 1, LAYERS, HEADS))
        experts = torch.randint(0, 4, (len(names) + 1, LAYERS, K)).short()
        steps = [running[name].length - 3 for name in names]
        if names:
            server.draw(names, [running[name].place for name in names], steps, values[:-1])
        first = torch.tensor([*(running[name].length - 1 for name in names), 5])
        server.route([*names, "another client's"], first.numpy(), torch.ones_like(first).numpy(), experts)
        numbers = torch.tensor([*(running[name].numbers[0] for name in names), 0])
        server.evict(numbers, first + 1, dropped)
        for i, name in enumerate(names):
            one = running[name]
            one.own.draw([name], [7], [steps[i]], values[i : i + 1])
            one.own.route([name], first[i : i + 1].numpy(), first.new_ones(1).numpy(), experts[i : i + 1])
            one.own.evict(torch.tensor([one.numbers[1]]), first[i : i + 1] + 1, dropped[i : i + 1])
            one.length += 1
        for name in list(running):
            one, chance = running[name], draw.random()
            if chance < 0.1 and one.length > 3:
                (theirs,) = server.take({one.place: one.length})
                (ours,) = one.own.take({7: one.length})
                assert theirs.pop("versions") == [one.first, server.version] or name not in names
                assert {**ours, "versions": 0} == {**theirs, "versions": 0}
                results.append(theirs)
            elif chance < 0.2:
                server.forget([one.place])
            else:
                continue
            free.append(one.place)
            del running[name]
    server.forget([one.place for one in running.values()])
    assert sizes(server) == at_start
    assert len({result["logprobs"] for result in results}) == len(results) > 5  # control


def test_samples_of_one_prefill_have_the_experts_that_their_holder_took() -> None:
    """Both, whichever is taken first. Control: a sample that was prefilled apart."""
    pytest.importorskip("vllm")
    from rollout.vllm.sampling import ServerRecord

    record, experts = ServerRecord(), torch.randint(0, 4, (12, LAYERS, K)).short()
    at_start = sizes(record)
    for place, name in enumerate(("holder", "a", "b", "apart"), -1):
        record.admit(name, place)
        record.begin(name, "holder" if name in "ab" else "")
    record.begin("another client's", "holder")
    one = np.array([1, 1, 4])
    record.route(["holder"], one[:1] * 0, one[:1] * 3, experts[:3])
    names = ["a", "b", "apart"]
    record.route(names, np.array([3, 3, 0]), one, experts[3:9])
    record.draw(names, [0, 1, 2], [0, 0, 0], torch.randn(3, 2))
    record.draw(["holder"], [-1], [0], torch.randn(1, 2))
    (of_b,), (of_a, apart) = record.take({1: 5}), record.take({0: 5, 2: 5})
    for result, rows in ((of_a, [0, 1, 2, 3]), (of_b, [0, 1, 2, 4]), (apart, [5, 6, 7, 8])):
        routed = np.frombuffer(result["routed"] or b"", np.int16).reshape(5, LAYERS, K)
        assert (routed[:-1] == experts[rows].numpy()).all() and (routed[-1] == -1).all()
    record.forget([-1])
    assert sizes(record) == at_start


def test_other_clients_alone_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes rollouts meanwhile. Control: the record of a run keeps all."""
    pytest.importorskip("vllm")
    from rollout.vllm import sampling

    monkeypatch.setattr(sampling, "HELD", 20)
    kept = []
    for record in (sampling.ServerRecord(), sampling.RunRecord()):
        number = record.begin("another client's")
        for step in range(2 * sampling.STEPS):
            record.evict(torch.tensor([number]), torch.tensor([step]), torch.zeros(1, LAYERS, HEADS))
            one = np.array([1])
            record.route(["another client's"], one * step, one, torch.zeros(1, LAYERS, K, dtype=torch.int16))
        kept.append(sum(map(len, (record._fetched, record.dropped, record.routed))))
    assert kept[0] == 0 < kept[1]


def test_rollouts_are_sampled_as_if_each_was_alone() -> None:
    """Several settings in one batch, beside a request with a seed and one without. Control: another seed."""
    pytest.importorskip("vllm")
    from rollout.vllm.compat.arguments import KEY
    from rollout.vllm.compat.runner import Row
    from rollout.vllm.sampling import SequenceSampler, ServerRecord

    kinds = [
        SamplingConfig(1),
        SamplingConfig(1, temperature=0.5, top_p=0.7, record_support=True),
        SamplingConfig(1, temperature=0.0),
        SamplingConfig(1, forced=(3, 4), forced_from=1),
    ]
    rows = [Row("plain", SimpleNamespace(extra_args=None), 0)]
    rows.append(Row("seeded", SimpleNamespace(extra_args={KEY: {"seeds": [9]}}, top_p=1.0, top_k=0), 4))
    record = ServerRecord()
    for i, kind in enumerate([*kinds, *kinds]):
        settings = {"place": i, "seed": 100 + i, "sampling": {**vars(kind), "forced": list(kind.forced)}}
        rows.append(Row(str(i), SimpleNamespace(extra_args={KEY: settings}), i))
        record.admit(str(i), i)
    settings = {"place": 8, "seed": 0, "sampling": vars(kinds[0]), "forced": [6, 5]}
    rows.append(Row("8", SimpleNamespace(extra_args={KEY: settings}), 1))
    record.admit("8", 8)
    runner = SimpleNamespace(rows=lambda count: rows[:count], routes=lambda count: None, failed=lambda count: None)

    def of_vllm(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        return logits.fill_(-1).argmax(-1).int(), None  # which writes into the logits

    sampler = SequenceSampler(runner, of_vllm, record)  # type: ignore[arg-type]
    logits = 3 * torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(0))
    sampled, _ = sampler(logits.clone(), {}, None, None)
    assert sampled[0] == 0
    assert int(sampled[10]) == 5  # given
    record._settle_all()
    others = []
    for i, kind in enumerate([*kinds, *kinds]):
        row = logits[i + 2 : i + 3]
        for seed, tokens in ((100 + i, None), (7, others)):
            uniform = torch.tensor([Uniforms(seed).at(i)], dtype=torch.float64) if kind.temperature else None
            forced = torch.tensor([(3, 4)[i - 1]]) if kind.forced and 1 <= i < 3 else None
            token, *logprobs = sample(row, kind, uniform, forced)
            if tokens is None:
                assert token == sampled[i + 2]
                assert record.by_step[str(i)][i] == [float(value) for value in logprobs[:2]]
            else:
                tokens.append(int(token) == int(sampled[i + 2]))
    assert not all(others)


def test_a_nan_score_is_in_the_record_of_its_rank() -> None:
    """vLLM's own outputs show only those of the first rank."""
    pytest.importorskip("vllm")
    from rollout.vllm.compat.arguments import KEY
    from rollout.vllm.compat.runner import Row
    from rollout.vllm.sampling import NOT_FINITE, SequenceSampler, ServerRecord

    record, kind = ServerRecord(), vars(SamplingConfig(1))
    rows = [
        Row(str(i), SimpleNamespace(extra_args={KEY: {"place": i, "seed": i, "sampling": kind}}), 0) for i in range(2)
    ]
    for i in range(2):
        record.admit(str(i), i)
    failed = torch.tensor([False, True])
    runner = SimpleNamespace(rows=lambda count: rows, routes=lambda count: None, failed=lambda count: failed)
    sampled, _ = SequenceSampler(runner, None, record)(torch.randn(2, 9), {}, None, None)  # type: ignore[arg-type]
    assert (sampled == NOT_FINITE).tolist() == [False, True]
    results = record.take({0: 2, 1: 2})
    assert [bool(np.isnan(np.frombuffer(result["logprobs"], np.float32)).any()) for result in results] == [False, True]
