"""Besides evict_at, a trace may have further sections. Every operation on traces keeps all sections, or refuses by name
those that it cannot keep. The tests add two made-up sections, `visits` and `gains` (tests/conftest.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_rl.attention import views as factory
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import ReplayView, make_view
from sparse_rl.trace import (
    NEVER,
    SECTIONS,
    EvictionTrace,
    TraceError,
    batch_traces,
    declared,
    load_traces,
    pack_traces,
    save_traces,
)
from sparse_rl.trace.files import content_hash

POSITIONS = ([1, 4], [], [0, 2, 3])  # positions of each trace's visits; one trace has none
LENGTHS = (6, 3, 5)


def equal(a: EvictionTrace, b: EvictionTrace) -> bool:
    """Return True if all sections are equal bit for bit."""
    ours, theirs = a.sections, b.sections
    return list(ours) == list(theirs) and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def evictions(length: int, seed: int = 0) -> EvictionTrace:
    """Return a trace with random evictions and no further section."""
    lifetime = torch.randint(1, length + 1, (2, 2, length), generator=torch.Generator().manual_seed(seed))
    return EvictionTrace.recorded(torch.arange(length) + lifetime)


@pytest.fixture
def traces(with_visits):
    """Return three traces with the sections evict_at, visits and gains."""
    return [with_visits(evictions(n, n), positions) for n, positions in zip(LENGTHS, POSITIONS, strict=True)]


def test_saved_traces_load_with_every_section(traces, tmp_path):
    path = tmp_path / "t.safetensors"
    save_traces(path, traces, {"model": "tiny"})
    with safe_open(str(path), framework="pt") as file:
        names = {"evict_at", "visits", "gains"}
        assert set(file.keys()) == names | {f"{name}.lengths" for name in names}
        assert file.get_tensor("visits").tolist() == [1, 4, 0, 2, 3]
        assert file.get_tensor("visits.lengths").tolist() == file.get_tensor("gains.lengths").tolist() == [2, 0, 3]
    loaded = load_traces(path, {"model": "tiny"})
    assert all(equal(a, b) for a, b in zip(loaded, traces, strict=True))
    # controls: fewer sections, and another number in a section
    assert not equal(loaded[0], EvictionTrace(loaded[0].evict_at))
    further = {**loaded[0].further, "gains": loaded[0].further["gains"] + 1e-6}
    assert not equal(loaded[0], EvictionTrace(loaded[0].evict_at, further))


def test_a_checkpoint_keeps_traces_with_every_section(traces, tmp_path):
    torch.save([trace.sections for trace in traces], tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(equal(EvictionTrace.from_state(s), trace) for s, trace in zip(states, traces, strict=True))
    with pytest.raises(TraceError, match=r"a trace needs the section evict_at; it has visits$"):
        EvictionTrace.from_state({"visits": torch.zeros(1, dtype=torch.int32)})


def test_a_batch_has_every_section(traces):
    """The batch has every section of its traces; positions (`visits`) are shifted with their rows."""
    batch = batch_traces(traces, [1, 4, 2], 7)
    assert list(batch) == ["evict_at", "visits", "gains"]
    assert batch["visits"].tolist() == [[2, 5, -1], [-1, -1, -1], [2, 4, 5]]
    assert batch["gains"].shape == (3, 3, 2)
    assert torch.equal(batch["gains"][2], traces[2].further["gains"])
    alone = batch_traces([EvictionTrace(t.evict_at) for t in traces], [1, 4, 2], 7)
    assert list(alone) == ["evict_at"]
    assert torch.equal(alone["evict_at"], batch["evict_at"])


def test_a_packed_sequence_has_every_section(traces):
    """Packing joins the sections of the traces; positions are shifted by the lengths of the traces before."""
    packed = pack_traces(traces)
    assert packed.further["visits"].tolist() == [1, 4, 9, 11, 12]
    assert torch.equal(packed.further["gains"], torch.cat([t.further["gains"] for t in traces]))
    assert torch.equal(packed.evict_at, pack_traces([EvictionTrace(t.evict_at) for t in traces]).evict_at)


def test_the_trace_of_a_full_cache_has_only_the_section_evict_at(traces):
    dense = traces[0].dense_like()
    assert list(dense.sections) == ["evict_at"]
    assert dense.shape == traces[0].shape == (2, 2, 6)
    assert bool((dense.evict_at == NEVER).all())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"other": torch.zeros(3)}, r"unknown trace section 'other'; the sections are evict_at, .*, visits, gains"),
        ({"visits": torch.zeros(3)}, r"visits must be int32 \[visit\], got torch.float32 \[3\]"),
        ({"visits": torch.zeros(2, 3, dtype=torch.int32)}, r"visits must be int32 \[visit\], got torch.int32 \[2, 3\]"),
        ({"visits": torch.tensor([-1], dtype=torch.int32)}, "visits must be positions"),
        ({"gains": torch.zeros(1, 3)}, "gains has 3 layers, but the trace has 2"),
        ({"visits": torch.zeros(1, dtype=torch.int32), "gains": torch.zeros(2, 2)}, "gains has 2 visits, but the"),
    ],
)
def test_a_wrong_section_is_refused(sections, message, with_visits):
    with pytest.raises(TraceError, match=message) as caught:
        EvictionTrace(evictions(4).evict_at, sections)
    assert "\n" not in str(caught.value)


def test_traces_with_different_sections_cannot_be_mixed(traces, tmp_path):
    mixed = [traces[0], EvictionTrace(traces[1].evict_at)]
    message = "trace 1 has the sections evict_at, but trace 0 has evict_at, visits, gains"
    with pytest.raises(TraceError, match=message):
        batch_traces(mixed, [0, 0], 6)
    with pytest.raises(
        TraceError, match=r"^trace 1 has the sections evict_at, visits, gains, but trace 0 has evict_at$"
    ):
        batch_traces(mixed[::-1], [0, 0], 6)
    with pytest.raises(TraceError, match=message):
        pack_traces(mixed)
    with pytest.raises(TraceError, match=message):
        save_traces(tmp_path / "t.safetensors", mixed)


def test_a_file_with_an_unknown_section_is_refused(traces, tmp_path, monkeypatch):
    """Another version of this project may write sections that this version does not have."""
    path = tmp_path / "t.safetensors"
    save_traces(path, traces)
    monkeypatch.delitem(SECTIONS, "gains")
    with pytest.raises(TraceError, match=r"t\.safetensors has an unknown section 'gains'; known sections: evict_at"):
        load_traces(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("visits.lengths"), r"holds no visits\.lengths"),
        (lambda t: t.pop("visits"), "holds no visits$"),
        (lambda t: t.update({"visits.lengths": torch.tensor([2, 3])}), "visits has 2 sequences, but evict_at has 3"),
        (lambda t: t.update({"visits.lengths": torch.tensor([2, 0, 4])}), r"visits \[5\] does not hold 6"),
        (lambda t: t.update({"gains.lengths": torch.tensor([1, 1, 3])}), "gains has 1 visits, but the trace has 2"),
    ],
)
def test_a_damaged_section_is_refused_with_its_path(change, message, traces, tmp_path):
    path = tmp_path / "t.safetensors"
    save_traces(path, traces)
    with safe_open(str(path), framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, str(path), metadata=metadata)
    assert len(load_traces(path)) == 3  # control: rewriting alone does no damage
    change(tensors)
    save_file(tensors, str(path), metadata={**metadata, "sha256": content_hash(tensors, metadata)})
    with pytest.raises(TraceError, match=message) as caught:
        load_traces(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_view_that_cannot_replay_a_section_refuses_it(traces):
    """Control: without the extra sections, `make_view` returns a ReplayView."""
    batch = batch_traces(traces, [0, 0, 0], 6)
    with pytest.raises(TraceError, match=r"^ReplayView cannot replay the section 'visits' of a trace; it replays ev"):
        ReplayView(batch, "cpu")
    with pytest.raises(TraceError, match=r"^no view replays .* visits, gains \(ReplayView replays evict_at; Matche"):
        make_view(traces, [0, 0, 0], 6, "cpu")
    evicted = [EvictionTrace(trace.evict_at) for trace in traces]
    assert type(make_view(evicted, [0, 0, 0], 6, "cpu").of_policy) is ReplayView  # control


def test_make_view_takes_the_view_that_replays_all_sections(traces, monkeypatch):
    class Visits(ReplayView):
        replays = frozenset({"evict_at", "visits", "gains"})

    monkeypatch.setattr(factory, "views", lambda: [ReplayView, Visits])
    assert type(make_view(traces, [0, 0, 0], 6, "cpu").of_policy) is Visits
    assert type(make_view([EvictionTrace(traces[0].evict_at)], [0], 6, "cpu").of_policy) is ReplayView


def test_replay_logprobs_refuses_sections_that_no_view_replays(with_visits, model_of):
    model, trace = model_of("qwen3"), evictions(6)
    rollout = SimpleNamespace(prompt_ids=[3, 4, 5], completion_ids=[6, 7, 8], trace=trace)
    assert replay_logprobs(model, [rollout])[0].shape == (3,)  # control
    rollout.trace = with_visits(trace, [2, 4])
    with pytest.raises(ValueError, match="no view replays traces with the sections evict_at, visits, gains") as caught:
        replay_logprobs(model, [rollout])
    assert "\n" not in str(caught.value)


def test_every_declared_section_has_the_name_of_its_key():
    """Each section is registered under its own name, and is joined along one of its own axes."""
    assert all(section.name == name and section.joined in section.axes for name, section in declared().items())


def test_recorded_experts_are_padded_shifted_and_packed():
    def with_experts(length: int) -> EvictionTrace:
        experts = torch.arange(2 * length * 2).view(2, length, 2).to(torch.int16)
        experts[:, -1] = -1
        return EvictionTrace(evictions(length).evict_at, {"routed": experts})

    traces = [with_experts(n) for n in LENGTHS]
    batch = batch_traces(traces, [0, 2, 1], 7)["routed"]
    assert batch.shape == (2, 3, 7, 2)
    for row, (trace, start) in enumerate(zip(traces, (0, 2, 1), strict=True)):
        assert torch.equal(batch[:, row, start : start + len(trace)], trace.further["routed"])
        assert bool((batch[:, row, :start] == -1).all() and (batch[:, row, start + len(trace) :] == -1).all())
    packed = pack_traces(traces).further["routed"]
    assert torch.equal(packed, torch.cat([trace.further["routed"] for trace in traces], dim=1))
