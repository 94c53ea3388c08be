"""Interruptions of commands that write a journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rollout.measure.journal import Journal


@contextmanager
def interrupted_after(writes: int) -> Iterator[None]:
    """Raise KeyboardInterrupt within the block, after the journal was written to `writes` times."""
    add, count = Journal.add, 0

    def interrupting_add(journal: Journal, lines: Any) -> None:
        nonlocal count
        count += 1
        if count > writes:
            raise KeyboardInterrupt
        add(journal, lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", interrupting_add)
        with pytest.raises(KeyboardInterrupt):
            yield
