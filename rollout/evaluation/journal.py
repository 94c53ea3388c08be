"""The journal of an evaluation: a file of finished results, which several processes share and which survives kills.

The journal has one JSON line per completion of a task, or per piece of a text. A *point* is a task or a text under one
cache policy. A line names its point by a digest of everything that determines the point's results (`point_key`). So an
evaluation can be continued after an interruption, also with further points. It ignores lines of points that it lacks.

A lock file lies beside the journal. A process that works on a point holds the lock of the point's byte in that file, so
that processes share the points among them. These POSIX record locks also work on shared file systems, and are released
when a process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from rollout.context.config import PromptCacheConfig
from rollout.engine import Engine
from sparse_rl.config import as_mapping
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy

logger = logging.getLogger("sparse_rl")
Line = dict[str, Any]

USE, WRITE, FIRST_POINT = 0, 1, 2  # bytes of the lock file: locked while a journal is open; while writing; for points
POINTS = 2**30  # number of bytes for points; if two points share a byte, only one process at a time works on them


def point_key(*parts: Any) -> str:
    """Return a digest of values that determine the results of a point."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class Journal:
    """Append-only file of JSON lines, shared by the processes of an evaluation.

    file : path of the journal; the lock file has the same path with the suffix .lock
    resume : True keeps the lines of earlier calls; False removes them
    unread : keys of a line that are not kept in memory

    Raises UserError if `resume` is False and another process uses the journal.
    """

    def __init__(self, file: Path, *, resume: bool = False, unread: Sequence[str] = ("completion",)) -> None:
        self.file, self.unread = file, unread
        self._lines: dict[str, dict[tuple[int, ...], Line]] = {}  # key of a point -> unit -> line
        self._read = 0  # number of bytes of the file that have been read
        self._locks = file.with_name(f"{file.name}.lock").open("a+b")
        if not resume:
            if not self._lock(USE, fcntl.LOCK_EX | fcntl.LOCK_NB):
                self._locks.close()
                wrong = f"{file.parent} is in use by another process; join it with --resume, or set another output_dir"
                raise UserError(wrong, "output_dir")
            file.write_bytes(b"")
        self._lock(USE, fcntl.LOCK_SH)
        self._file = file.open("a+b")
        self.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._locks.close()  # releases the locks

    @contextmanager
    def take(self, point: str) -> Iterator[bool]:
        """Hold the lock of a point in this block. Yields False if another process holds it."""
        byte = FIRST_POINT + int(point, 16) % POINTS
        taken = self._lock(byte, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if taken:
                self.refresh()
            yield taken
        finally:
            if taken:
                self._lock(byte, fcntl.LOCK_UN)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock for writing in this block. Other processes wait."""
        self._lock(WRITE, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._lock(WRITE, fcntl.LOCK_UN)

    def add(self, lines: Sequence[Line]) -> None:
        """Append lines, which have the keys `point` and `unit` (a list). A line whose unit has a line is left out."""
        new = [line for line in lines if tuple(line["unit"]) not in self._lines.get(line["point"], {})]
        text = "".join(json.dumps(line) + "\n" for line in new).encode()
        with self.writing():
            size = self._file.seek(0, os.SEEK_END)
            if size:
                self._file.seek(size - 1)
                text = text if self._file.read(1) == b"\n" else b"\n" + text  # a killed process left half a line
            self._file.write(text)
            self._file.flush()
        self.refresh()

    def clear(self) -> None:
        """Remove all lines. No other process may use the journal."""
        self._file.truncate(0)
        self._lines, self._read = {}, 0

    def refresh(self) -> None:
        """Read the lines that were appended since the last call, by this process or by others."""
        self._file.seek(self._read)
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break  # another process is writing this line
            self._read += len(raw)
            try:
                line = json.loads(raw)
                point, unit = line["point"], tuple(line["unit"])
            except (ValueError, LookupError, TypeError):
                continue  # half a line of a killed process
            kept = {key: value for key, value in line.items() if key not in self.unread}
            self._lines.setdefault(point, {}).setdefault(unit, kept)

    def lines(self, point: str) -> list[Line]:
        """Return the lines of a point, ordered by unit, so that sums do not depend on the order of the work."""
        lines = self._lines.get(point, {})
        return [lines[unit] for unit in sorted(lines)]

    def units(self, point: str) -> Mapping[tuple[int, ...], Line]:
        """Return the finished units of a point: unit -> line."""
        return self._lines.get(point, {})

    def _lock(self, byte: int, operation: int) -> bool:
        """Lock or unlock one byte of the lock file. Returns False if another process holds the lock."""
        try:
            fcntl.lockf(self._locks, operation, 1, byte)
        except OSError as error:
            if error.errno in (EACCES, EAGAIN):
                return False
            logger.warning(
                "the file system of %s has no locks (%s): let one process at a time evaluate there",
                self.file.parent,
                error.strerror,
            )
        return True


class Results(Protocol):
    """A point of an evaluation: a task, or a text, under the cache policy `cache`."""

    key: str
    cache: Any

    @property
    def complete(self) -> bool:
        """True if the journal holds all lines of the point."""
        ...


P = TypeVar("P", bound=Results)


def work(
    points: Sequence[P],
    open_engine: Callable[[Any], AbstractContextManager[Engine]],
    journal: Journal,
    do: Callable[[P, Engine], None],
    on_point: Callable[[], object],
) -> None:
    """Work on every point that is not complete, unless another process works on the point.

    The points are worked on cache by cache, so that points with the same cache share an engine. Then points that
    another process has left incomplete are taken over.

    open_engine : function cache -> context manager of the engine for this cache
    do : function that adds the missing lines of a point to the journal
    on_point : called after work on a point
    """
    by_cache: dict[str, list[P]] = {}
    for point in points:
        by_cache.setdefault(point_key(settings_of(point.cache)), []).append(point)
    worked = True
    while worked:
        worked = False
        for alike in by_cache.values():
            with ExitStack() as stack:
                engine = None
                for point in alike:
                    with journal.take(point.key) as taken:
                        if not taken or point.complete:
                            continue
                        engine = engine or stack.enter_context(open_engine(point.cache))
                        do(point, engine)
                        worked = True
                    on_point()


def settings_of(cache: Policy | PromptCacheConfig) -> dict[str, Any]:
    """Return the name and all settings of a cache policy, or of the compaction of contexts."""
    if isinstance(cache, PromptCacheConfig):
        return as_mapping(cache)
    return {"policy": cache.name, **cache.parameters()}
