"""A damaged or hostile trace file is refused in one line, or loads as it was written. It never loads with other
contents.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from test_trace import random_trace

from sparse_rl.cli import main
from sparse_rl.trace import NEVER, EvictionTrace, TraceError, load_traces, read_fingerprint, save_traces
from sparse_rl.trace.files import content_hash

FAST = settings(max_examples=20, deadline=None, derandomize=True, database=None)
SLOW = settings(FAST, max_examples=1000)
MADE_BY = {"model": "tiny", "policy": '{"budget": 8}'}
LONGEST = 600  # maximum number of characters of an error, besides the path


def read(path: Path) -> tuple[list[EvictionTrace], dict[str, str]] | None:
    """Return the content of a file, or None if it is refused in one line of bounded length."""
    try:
        return load_traces(path), read_fingerprint(path)
    except TraceError as error:
        line = str(error)
        assert str(path) in line
        assert "\n" not in line
        assert len(line) < len(str(path)) + LONGEST
        return None


def refused_or_original(path: Path, rows: list[EvictionTrace], made_by: dict[str, str]) -> bool:
    """Return True if a file is refused or holds the original data."""
    if (computed := read(path)) is None:
        return True
    same = (torch.equal(a.evict_at, b.evict_at) for a, b in zip(computed[0], rows, strict=True))
    return len(computed[0]) == len(rows) and all(same) and computed[1] == made_by


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 11])
def test_no_flipped_bit_changes_the_contents(step, tmp_path):
    """The file is refused or loads as written."""
    path, rows = tmp_path / "t.safetensors", [random_trace(0, length=5), random_trace(1, length=3)]
    save_traces(path, rows, MADE_BY)
    whole = path.read_bytes()
    assert read(path) is not None, "control"
    for bit in range(0, 8 * len(whole), step):
        path.write_bytes(flipped(whole, bit))
        assert refused_or_original(path, rows, MADE_BY), f"bit {bit} of {8 * len(whole)}"
    path.write_bytes(flipped(whole, 8 * len(whole) - 8))  # a bit of a value, which only the hash protects
    with pytest.raises(TraceError, match=r"is damaged: its content does not match the stored sha256"):
        load_traces(path)


def flipped(whole: bytes, bit: int) -> bytes:
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[list[EvictionTrace], bytes]:
    """Return traces, and their file after bits are flipped, bytes are lost, doubled or inserted, or two parts are
    exchanged.
    """
    seeds = draw(st.lists(st.integers(0, 10_000), min_size=1, max_size=3))
    rows = [random_trace(seed, length=draw(st.integers(1, 30))) for seed in seeds]
    whole = file_of(rows)
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted(draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
        kind = draw(st.sampled_from(["flip", "lose", "double", "insert", "exchange", "zero"]))
        if kind == "flip" and whole:
            whole = flipped(whole, draw(st.integers(0, 8 * len(whole) - 1)))
        elif kind == "lose":
            whole = whole[:a] + whole[b:]
        elif kind == "double":
            whole = whole[:b] + whole[a:]
        elif kind == "insert":
            whole = whole[:a] + draw(st.binary(max_size=20)) + whole[a:]
        elif kind == "exchange":
            whole = whole[b:] + whole[a:b] + whole[:a]
        elif kind == "zero":
            whole = whole[:a] + bytes(b - a) + whole[b:]
    return rows, whole


def file_of(rows: list[EvictionTrace]) -> bytes:
    tensors = {
        "evict_at": torch.cat([row.evict_at for row in rows], dim=-1),
        "evict_at.lengths": torch.tensor([len(row) for row in rows]),
    }
    return signed(tensors, {"format": "sparse_rl.trace", "format_version": "2", "fingerprint": json.dumps(MADE_BY)})


def signed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    """Return a file with the correct hash of its contents."""
    return save(tensors, metadata={**metadata, "sha256": content_hash(tensors, metadata)})


def check_damage(folder: Path, case: tuple[list[EvictionTrace], bytes]) -> None:
    """Check that the damaged file is refused or holds the original traces."""
    path = folder / "t.safetensors"
    path.write_bytes(case[1])
    assert refused_or_original(path, case[0], MADE_BY)


@FAST
@given(case=damaged())
def test_a_damaged_file_is_refused_or_loads_as_written(case, tmp_path_factory):
    check_damage(tmp_path_factory.getbasetemp(), case)


@pytest.mark.slow
@SLOW
@given(case=damaged())
def test_a_damaged_file_is_refused_or_loads_as_written_in_1000_cases(case, tmp_path_factory):
    check_damage(tmp_path_factory.getbasetemp(), case)


DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64]
DEEP = 20_000
TEXTS = st.one_of(
    st.sampled_from(["", "{}", "[]", "null", "NaN", "9" * 5000, '{"a": ' * DEEP + "1" + "}" * DEEP, "[" * DEEP]),
    st.sampled_from(['{"model": "\\ud800"}', '{"model": {"a": 1}}', '{"model": ["a"]}', '{"m": "' + "x" * 9999 + '"}']),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3).map(json.dumps),
    st.text(max_size=20),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = draw(st.sampled_from([0, 1, 2, NEVER, NEVER + 1, 2**31 - 1, -1, -(2**31)]))
    values = draw(st.lists(st.integers(-2, 6), min_size=1, max_size=8))
    filled = torch.tensor((values * 256)[: max(1, torch.Size(shape).numel())])[: torch.Size(shape).numel()]
    wide = torch.where(filled == 6, torch.tensor(count), filled).reshape(shape)
    return wide.to(draw(st.sampled_from(DTYPES)))


@st.composite
def crafted(draw: st.DrawFn) -> bytes:
    """Return random names, dtypes, shapes, values and texts; valid ones of a trace are more frequent."""
    name = st.one_of(st.sampled_from(["evict_at", "evict_at.lengths"]), st.text(max_size=5), st.just("x" * 10_000))
    held = draw(st.dictionaries(name, tensors(), max_size=3))
    if draw(st.booleans()):
        shape = draw(st.tuples(*[st.integers(0, 3)] * 3))
        held["evict_at"] = torch.full(shape, draw(st.sampled_from([NEVER, 1, 2, NEVER - 1])), dtype=torch.int32)
        few = st.one_of(st.integers(0, 3), st.sampled_from([-1, 2**62, 2**63 - 1]))
        held["evict_at.lengths"] = torch.tensor(draw(st.lists(few, max_size=3)), dtype=torch.int64)
    usual = {"format": "sparse_rl.trace", "format_version": "2", "fingerprint": draw(TEXTS)}
    other = draw(st.dictionaries(st.sampled_from([*usual, "x", "y" * 5000]), st.text(max_size=5), max_size=1))
    return signed(held, {**usual, **other})


def check_crafted(folder: Path, whole: bytes) -> None:
    """Check that the file is refused, or loads as a trace that `inspect` shows and that can be saved again."""
    path = folder / "crafted.safetensors"
    path.write_bytes(whole)
    content = read(path)
    assert main(["inspect", str(path)]) == (2 if content is None else 0)
    if content is not None:
        save_traces(path, *content)
        assert refused_or_original(path, *content)


@FAST
@given(whole=crafted())
def test_a_hostile_file_is_refused_or_is_a_valid_trace(whole, tmp_path_factory):
    """The file has random contents (`crafted`) and a correct hash."""
    check_crafted(tmp_path_factory.getbasetemp(), whole)


@pytest.mark.slow
@SLOW
@given(whole=crafted())
def test_a_hostile_file_is_refused_or_is_a_valid_trace_in_1000_cases(whole, tmp_path_factory):
    check_crafted(tmp_path_factory.getbasetemp(), whole)


def test_a_file_without_a_hash_is_refused_in_one_line(tmp_path):
    path, row = tmp_path / "t.safetensors", random_trace(0)
    held = {"evict_at": row.evict_at, "evict_at.lengths": torch.tensor([len(row)])}
    metadata = {"format": "sparse_rl.trace", "format_version": "2", "fingerprint": "{}"}
    save_file(held, path, metadata=metadata)
    with pytest.raises(TraceError, match=r"^\S*t\.safetensors has no sha256: an earlier version wrote it, [^\n]*$"):
        load_traces(path)
    path.write_bytes(signed(held, metadata))
    assert torch.equal(EvictionTrace.load(path).evict_at, row.evict_at)


def test_an_invalid_trace_is_not_written(tmp_path):
    path = tmp_path / "t.safetensors"
    late = EvictionTrace(torch.full((1, 1, 4), 3, dtype=torch.int32), validate=False)
    with pytest.raises(
        TraceError, match=r"^evict_at\[0, 0, 3\] = 3: a token can be evicted only after its own position$"
    ):
        late.save(path)
    assert not path.exists()
