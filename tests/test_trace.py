"""An EvictionTrace says, by one integer `evict_at` per layer, kv head and token, which tokens each query sees: token t
is visible to query q if t <= q < evict_at of t. The tests cover traces in memory, in batches and in files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from sparse_rl.trace import (
    FORMAT_VERSION,
    NEVER,
    EvictionTrace,
    TraceError,
    batch_traces,
    load_traces,
    pack_traces,
    read_fingerprint,
    save_traces,
)
from sparse_rl.trace.files import content_hash

LAW = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def random_trace(seed: int, layers: int = 2, kv_heads: int = 2, length: int = 9) -> EvictionTrace:
    """Return a trace in which about half of the tokens are evicted, at any later position at which a query can observe
    the eviction.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, kv_heads, length)
    at = torch.arange(length) + 1 + torch.randint(0, length, shape, generator=generator)
    kept = torch.rand(shape, generator=generator) < 0.4
    return EvictionTrace.recorded(torch.where(kept, NEVER, at))


@st.composite
def traces(draw: st.DrawFn, layers: int = 2, kv_heads: int = 2) -> EvictionTrace:
    return random_trace(draw(st.integers(0, 10_000)), layers, kv_heads, draw(st.integers(1, 14)))


def sees(trace: EvictionTrace, layer: int, head: int, query: int, token: int) -> bool:
    """Return True if the query sees the token, by the definition."""
    return token <= query < int(trace.evict_at[layer, head, token])


def same_evictions(ours: list[EvictionTrace], theirs: list[EvictionTrace]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(a.evict_at, b.evict_at) for a, b in zip(ours, theirs, strict=True)
    )


@LAW
@given(traces())
def test_visible_equals_the_definition(trace):
    for layer in range(trace.layers):
        visible = trace.visible(layer)
        assert visible.dtype == torch.bool
        assert visible.shape == (trace.kv_heads, len(trace), len(trace))
        for head in range(trace.kv_heads):
            for query in range(len(trace)):
                for token in range(len(trace)):
                    assert bool(visible[head, query, token]) == sees(trace, layer, head, query, token)
    positions = torch.arange(len(trace))
    assert bool(visible[:, positions, positions].all()), "a token sees itself"


@LAW
@given(traces())
def test_an_evicted_token_never_returns(trace: EvictionTrace) -> None:
    visible = trace.visible(0)
    for token in range(len(trace)):
        column = visible[:, token:, token].int()
        assert bool((column.diff(dim=1) <= 0).all())


def test_an_eviction_that_no_query_observes_is_recorded_as_never() -> None:
    record = torch.tensor([[[4, 5, 6, 7, NEVER, NEVER + 3]]], dtype=torch.int64)
    trace = EvictionTrace.recorded(record)
    assert trace.evict_at.tolist() == [[[4, NEVER, NEVER, NEVER, NEVER, NEVER]]]
    assert trace.evict_at.dtype == torch.int32
    assert trace.evict_at.device.type == "cpu"
    assert record[0, 0].tolist()[:3] == [4, 5, 6], "the engine's record does not change"
    before = EvictionTrace(record.to(torch.int32), validate=False).visible(0)[:, :5]
    assert torch.equal(trace.visible(0)[:, :5], before), "all queries see the same tokens as before"


@pytest.mark.parametrize(
    ("evict_at", "message"),
    [
        (torch.full((2, 2, 4), NEVER), r"must be int32 \[layer, kv_head, token\], got torch.int64 \[2, 2, 4\]"),
        (torch.full((2, 2, 4), 9.0), "got torch.float32"),
        (torch.full((2, 4), NEVER, dtype=torch.int32), r"got torch.int32 \[2, 4\]"),
        (torch.full((1, 2, 2, 4), NEVER, dtype=torch.int32), r"\[1, 2, 2, 4\]"),
        (
            torch.full((2, 2, 4), 3, dtype=torch.int32),
            r"evict_at\[0, 0, 3\] = 3: a token can be evicted only after its own",
        ),
        (
            torch.full((0, 2, 4), NEVER, dtype=torch.int32),
            r"evict_at \[0, 2, 4\] is empty: a trace has at least one layer, kv",
        ),
        (torch.full((2, 0, 4), NEVER, dtype=torch.int32), r"evict_at \[2, 0, 4\] is empty"),
        (torch.full((2, 2, 0), NEVER, dtype=torch.int32), r"evict_at \[2, 2, 0\] is empty"),
        (torch.zeros((1, 1, 2), dtype=torch.int32), r"evict_at\[0, 0, 0\] = 0"),
        (torch.full((1, 1, 2), -1, dtype=torch.int32), r"evict_at\[0, 0, 0\] = -1"),
    ],
)
def test_a_trace_of_wrong_dtype_shape_or_values_is_refused(evict_at, message):
    with pytest.raises(TraceError, match=message) as caught:
        EvictionTrace(evict_at)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    EvictionTrace(evict_at, validate=False)  # tests build deliberately wrong traces


@LAW
@given(traces(), st.data())
def test_an_eviction_is_after_the_token_and_before_the_last_query_or_never(trace, data):
    token = data.draw(st.integers(0, len(trace) - 1))
    beyond = st.sampled_from([len(trace) - 1, len(trace), NEVER - 1, NEVER + 1, 2**31 - 1, -(2**31)])
    at = data.draw(st.one_of(st.integers(-1, len(trace)), st.integers(-(2**31), 2**31 - 1), beyond))
    changed = trace.evict_at.clone()
    changed[1, 0, token] = at
    if token < at <= len(trace) - 2 or at == NEVER:
        EvictionTrace(changed)
        return
    with pytest.raises(TraceError, match=rf"^evict_at\[1, 0, {token}\] = {at}: [^\n]*$"):
        EvictionTrace(changed)


@LAW
@given(traces())
def test_statistics_equal_counting(trace):
    fed = max(len(trace) - 1, 1)  # the last token is sampled, never fed
    for query in [None, *range(len(trace))]:
        counts = trace.kept_counts(query)
        assert counts.dtype == torch.int64
        assert counts.shape == (trace.layers, trace.kv_heads)
        at = fed - 1 if query is None else query
        for layer in range(trace.layers):
            for head in range(trace.kv_heads):
                assert counts[layer, head] == sum(sees(trace, layer, head, at, t) for t in range(at + 1))
    for prompt in range(len(trace) + 1):
        peaks = [trace.kept_counts(query) for query in range(prompt, len(trace) - 1)]  # for decoding queries
        expected = torch.stack(peaks).amax(0) if peaks else torch.zeros(trace.shape[:2], dtype=torch.int64)
        assert torch.equal(trace.peak_counts(prompt), expected)
    mean = float(trace.kept_counts().double().mean()) / fed
    assert trace.retention() == pytest.approx(mean)
    assert 0 < trace.retention() <= 1
    for bins in (1, 3, 20):
        density = trace.density(bins)
        assert density.shape == (bins,)
        for which in range(bins):
            tokens = [t for t in range(fed) if t * bins // fed == which]
            held = [
                sees(trace, layer, head, fed - 1, t)
                for t in tokens
                for layer in range(trace.layers)
                for head in range(trace.kv_heads)
            ]
            assert float(density[which]) == pytest.approx(sum(held) / len(held) if held else 0.0)
    if len(trace) > 1:
        assert float(trace.density(1)) == pytest.approx(trace.retention())


def seen_in_batch(batch: torch.Tensor, layer: int, row: int, head: int, query: int, column: int) -> bool:
    return column <= query < int(batch[layer, row, head, column])


@settings(LAW, max_examples=20)
@given(st.lists(traces(), min_size=1, max_size=4), st.integers(0, 3), st.sampled_from(["left", "right", "middle"]))
def test_in_a_batch_rows_see_their_own_tokens_and_no_padding(rows, extra, side):
    """Control: a row that moves without its values differs."""
    width = max(len(t) for t in rows) + extra
    padding = [width - len(t) for t in rows]
    starts = {"left": padding, "right": [0] * len(rows), "middle": [r // 2 for r in padding]}[side]
    batch = batch_traces(rows, starts, width)["evict_at"]
    assert batch.shape == (2, len(rows), 2, width)
    assert batch.dtype == torch.int32
    assert batch[0].is_contiguous(), "one layer's slice is one block"
    for layer in range(2):
        for row, (trace, start) in enumerate(zip(rows, starts, strict=True)):
            for head in range(2):
                for query in range(width):
                    for column in range(width):
                        seen = seen_in_batch(batch, layer, row, head, query, column)
                        real_query = start <= query < start + len(trace)
                        if not start <= column < start + len(trace):
                            assert not seen, "a pad key is seen"
                        elif real_query:
                            assert seen == sees(trace, layer, head, query - start, column - start)
    if side == "left" and max(padding):  # control: if a row moves without its values, the trace differs
        row = padding.index(max(padding))
        unmoved = torch.where(rows[row].evict_at < NEVER, rows[row].evict_at, NEVER)
        moved = batch[:, row, :, starts[row] :]
        assert torch.equal(moved, unmoved) == (not bool((unmoved < NEVER).any()))


def test_a_row_that_does_not_fit_is_refused():
    rows = [random_trace(0), random_trace(1)]
    batch_traces(rows, [0, 1], 10)
    for starts, width in (([0, 2], 10), ([0, -1], 10), ([0, 0], 8)):
        with pytest.raises(TraceError, match=r"row \d: 9 tokens from column -?\d do not fit into \d+ columns"):
            batch_traces(rows, starts, width)
    with pytest.raises(
        TraceError, match=r"trace 1 has evict_at \[3, 2, \d+\], but trace 0 has \[2, 2, \d+\] \(layer x kv_head"
    ):
        batch_traces([random_trace(0), random_trace(1, layers=3)], [0, 0], 9)
    with pytest.raises(ValueError, match="zip"):
        batch_traces(rows, [0], 9)


@settings(LAW, max_examples=20)
@given(st.lists(traces(), min_size=1, max_size=4))
def test_packed_documents_see_only_themselves(docs):
    packed = pack_traces(docs)
    origins = [(d, t) for d, doc in enumerate(docs) for t in range(len(doc))]
    assert len(packed) == len(origins)
    assert packed.evict_at.dtype == torch.int32
    for layer in range(2):
        visible = packed.visible(layer)
        for head in range(2):
            for query, (query_doc, at) in enumerate(origins):
                for key, (key_doc, token) in enumerate(origins):
                    expected = query_doc == key_doc and sees(docs[key_doc], layer, head, at, token)
                    assert bool(visible[head, query, key]) == expected, (query, key)


FINGERPRINT = {"model": "tiny", "policy": '{"budget": 8, "policy": "morphkv"}'}


@settings(LAW, max_examples=15)
@given(rows=st.lists(traces(layers=3, kv_heads=1), min_size=1, max_size=4))
def test_saved_traces_load_as_written(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "many.safetensors"
    save_traces(path, rows, FINGERPRINT)
    assert same_evictions(load_traces(path), rows)
    assert same_evictions(load_traces(str(path), FINGERPRINT), rows)
    assert read_fingerprint(path) == FINGERPRINT
    rotated = [*rows[1:], rows[0]]  # control: another order of the traces
    assert same_evictions(load_traces(path), rotated) == same_evictions(rows, rotated)


def test_a_single_saved_trace_loads_as_written(tmp_path):
    trace, path = random_trace(3), tmp_path / "one.safetensors"
    trace.save(path)
    loaded = EvictionTrace.load(path)
    assert torch.equal(loaded.evict_at, trace.evict_at)
    assert loaded.evict_at.dtype == torch.int32
    assert read_fingerprint(path) == {}
    save_traces(path, [trace, trace])
    with pytest.raises(TraceError, match=r"one\.safetensors holds 2 traces; read it with load_traces"):
        EvictionTrace.load(path)
    with pytest.raises(TraceError, match="at least one trace is needed"):
        save_traces(tmp_path / "empty.safetensors", [])
    assert not (tmp_path / "empty.safetensors").exists()


def test_a_file_holds_sections_lengths_version_and_fingerprint(tmp_path):
    path = tmp_path / "t.safetensors"
    save_traces(path, [random_trace(0, length=4), random_trace(1, length=6)], FINGERPRINT)
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == {"evict_at", "evict_at.lengths"}
        assert file.get_tensor("evict_at").shape == (2, 2, 10)
        assert file.get_tensor("evict_at.lengths").tolist() == [4, 6]
        metadata = file.metadata()
    assert metadata["format_version"] == str(FORMAT_VERSION)
    assert json.loads(metadata["fingerprint"]) == FINGERPRINT


def test_a_file_with_another_fingerprint_than_expected_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    random_trace(0).save(path, FINGERPRINT)
    EvictionTrace.load(path, {"model": "tiny"})  # only the requested fields are compared
    for wrong in ({"model": "other"}, {**FINGERPRINT, "policy": "{}"}, {"revision": "1"}):
        with pytest.raises(TraceError, match=r"t\.safetensors was recorded with (model|policy|revision) .*, not '"):
            EvictionTrace.load(path, wrong)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> None:
    """Save two traces, then save them again with changed sections or metadata."""
    save_traces(path, [random_trace(0, length=4), random_trace(1, length=6)], FINGERPRINT)
    with safe_open(str(path), framework="pt") as file:
        sections = {name: file.get_tensor(name) for name in ("evict_at", "evict_at.lengths")}
        metadata = file.metadata()
    change(sections, metadata)
    save_file(sections, str(path), metadata={**metadata, "sha256": content_hash(sections, metadata)})


def put(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor], dict[str, str]], object]:
    """Return a change for `rewrite` that replaces one section."""
    return lambda sections, _: sections.update({name: tensor})


def set_metadata(**metadata: str) -> Callable[[dict[str, torch.Tensor], dict[str, str]], object]:
    """Return a change for `rewrite` that replaces metadata."""
    return lambda _, stored: stored.update(metadata)


FULL = torch.full((2, 2, 10), NEVER, dtype=torch.int32)

DAMAGE = {
    "another version": (set_metadata(format_version="1"), "has format version '1'; the supported versions: 2"),
    "no version": (lambda _, m: m.pop("format_version"), "has format version None"),
    "another format": (
        set_metadata(format="weights"),
        r"is not a trace file \(format 'weights', expected 'sparse_rl.trace'\)",
    ),
    "no format": (lambda _, m: m.clear(), r"is not a trace file \(format None"),
    "unknown section": (put("bias", torch.zeros(3)), "has an unknown section 'bias'; known sections: evict_at"),
    "no lengths": (lambda s, _: s.pop("evict_at.lengths"), r"holds no evict_at\.lengths"),
    "no evict_at": (lambda s, _: s.pop("evict_at"), "holds no evict_at$"),
    "nothing": (lambda s, _: s.clear(), "holds no evict_at$"),
    "int64": (put("evict_at", FULL.long()), "must be int32"),
    "float": (put("evict_at", FULL.float()), "must be int32"),
    "rank 2": (put("evict_at", FULL[0].clone()), r"evict_at \[2, 10\] does not hold 10 tokens in total"),
    "too short": (put("evict_at", FULL[..., :9].clone()), r"\[2, 2, 9\] does not hold 10 tokens in total"),
    "lengths too long": (
        put("evict_at.lengths", torch.tensor([4, 7])),
        "does not hold 11 tokens in total",
    ),
    "too early": (
        put("evict_at", FULL.masked_fill(FULL > 0, 2)),
        r"evict_at\[0, 0, 2\] = 2: a token can be evicted only",
    ),
    "too late": (
        put("evict_at", FULL - 1),
        rf"evict_at\[0, 0, 0\] = {NEVER - 1}: the last query is at 2; a token that is never evicted",
    ),
    "no layer": (put("evict_at", FULL[:0].clone()), r"evict_at \[0, 2, 4\] is empty"),
    "no kv head": (put("evict_at", FULL[:, :0].clone()), r"evict_at \[2, 0, 4\] is empty"),
    "zero": (put("evict_at", torch.zeros_like(FULL)), r"evict_at\[0, 0, 0\] = 0: a token can be evicted only after"),
    "negative length": (put("evict_at.lengths", torch.tensor([-1, 11])), "evict_at.lengths must be an int64 tensor"),
    "lengths of floats": (
        put("evict_at.lengths", torch.tensor([4.0, 6.0])),
        "evict_at.lengths must be an int64 tensor",
    ),
    "lengths of rank 2": (put("evict_at.lengths", torch.tensor([[4, 6]])), "evict_at.lengths must be an int64 tensor"),
    "lengths of rank 0": (put("evict_at.lengths", torch.tensor(10)), "evict_at.lengths must be an int64 tensor"),
    "fingerprint that is no JSON": (set_metadata(fingerprint="{"), "is not a JSON mapping"),
    "fingerprint that is no mapping": (set_metadata(fingerprint="[]"), "is not a JSON mapping"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_refused_with_its_path(kind, tmp_path):
    path = tmp_path / "damaged.safetensors"
    change, message = DAMAGE[kind]
    rewrite(path, lambda sections, metadata: None)
    assert len(load_traces(path)) == 2  # control: rewriting alone does no damage
    rewrite(path, change)
    with pytest.raises(TraceError, match=message) as caught:
        load_traces(path, {"model": "tiny"})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_truncated_at_any_byte_is_refused(tmp_path):
    path = tmp_path / "cut.safetensors"
    save_traces(path, [random_trace(0, length=40)], FINGERPRINT)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for read in (load_traces, EvictionTrace.load, read_fingerprint):
            with pytest.raises(TraceError, match="cannot be read") as caught:
                read(path)
            assert str(path) in str(caught.value), size
    path.write_bytes(whole + b"\0")
    with pytest.raises(TraceError, match="cannot be read"):
        load_traces(path)
    path.write_bytes(whole)
    assert len(EvictionTrace.load(path)) == 40  # control


def test_paths_that_are_not_trace_files_are_refused(tmp_path):
    missing, text = tmp_path / "missing.safetensors", tmp_path / "text.safetensors"
    with pytest.raises(TraceError, match=r"missing\.safetensors does not exist"):
        load_traces(missing)
    text.write_text("evict_at = never\n" * 20)
    for path in (text, tmp_path):
        with pytest.raises(TraceError, match="cannot be read") as caught:
            load_traces(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("join", ["pack", "save"])
def test_traces_of_different_models_cannot_be_mixed(join, tmp_path):
    docs = [random_trace(0), random_trace(0, layers=3)]
    with pytest.raises(TraceError):
        pack_traces(docs) if join == "pack" else save_traces(tmp_path / "t.safetensors", docs)
