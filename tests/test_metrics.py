"""Reading metrics.jsonl never fails: valid lines are returned, and all other lines are skipped."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.metrics import METRICS_FILE, read_metrics

LINES = [{"step": step, "reward": step / 2, "note": "größer"} for step in range(3)]
JUNK = (b"\xff\xfe\x00", b"{", b"5", b"[]", b"null", b"{}", b'{"step": "1"}', b'{"step": true}', b'{"step": NaN}')
DEEP = (b"[" * 20_000, b'{"step": ' + b"7" * 5000 + b"}", b'{"step": 18446744073709551616}', b'{"a": "\xe9"}')


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(st.sampled_from((*JUNK, *DEEP)) | st.binary(max_size=20), max_size=4), st.randoms(use_true_random=False)
)
def test_damaged_lines_of_metrics_are_skipped(junk, random) -> None:
    """hypothesis mixes damaged lines, and random bytes, with three valid lines. A folder without the file has none."""
    junk = [line.replace(b"\n", b"") for line in junk]
    mixed = [*junk, *(json.dumps(line).encode() for line in LINES)]
    random.shuffle(mixed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / METRICS_FILE).write_bytes(b"\n".join(mixed))
        assert sorted(read_metrics(folder), key=lambda line: line["step"]) == LINES
        assert read_metrics(Path(folder) / "nowhere") == []
