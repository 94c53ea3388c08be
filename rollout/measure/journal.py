"""The journal of an evaluation: a file of finished results, which several processes share and which survives kills.

The journal has one JSON line per completion of a task, or per piece of a text. A *point* is a task or a text under one
cache policy. A line names its point by a digest of everything that determines the point's results (`point_key`). So an
evaluation can be continued after an interruption, also with further points.

A process that works on a point holds the lock of the point's byte in a file beside the journal. These POSIX record
locks also work on shared file systems, and are released when a process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from rollout.context.config import PromptCacheConfig
from sparse_rl.config import as_mapping
from sparse_rl.errors import UserError
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage, stage

logger = logging.getLogger("sparse_rl")
Line = dict[str, Any]
Unit = tuple[int, ...]

USE, WRITE, FIRST_POINT = 0, 1, 2  # bytes of the lock file: locked while a journal is open; while writing; for points
POINTS = 2**30  # number of bytes for points; if two points share a byte, only one process at a time works on them


def point_key(*parts: Any) -> str:
    """Return a digest of values that determine the results of a point."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


class Journal:
    """Append-only file of JSON lines, shared by the processes of an evaluation.

    file : path of the journal; the lock file has the same path with the suffix .lock
    resume : True keeps the lines of earlier calls; False removes them

    Raises UserError if `resume` is False and another process uses the journal.
    """

    def __init__(self, file: Path, *, resume: bool = False) -> None:
        self.file = file
        self._lines: dict[str, dict[Unit, Line]] = {}  # key of a point -> unit -> line
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

    def refresh(self) -> None:
        """Read the lines that were appended since the last call, by this process or by others."""
        self._file.seek(self._read)
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break  # another process is writing this line
            self._read += len(raw)
            try:
                line = json.loads(raw)
                point, unit = line["point"], line["unit"]
            except (ValueError, LookupError, TypeError, RecursionError):
                continue  # half a line of a killed process
            if isinstance(point, str) and isinstance(unit, list) and all(type(number) is int for number in unit):
                line.pop("completion", None)  # its text is long
                self._lines.setdefault(point, {}).setdefault(tuple(unit), line)

    def lines(self, point: str) -> list[Line]:
        """Return the lines of a point, ordered by unit, so that sums do not depend on the order of the work."""
        return [line for _, line in sorted(self.units(point).items())]

    def units(self, point: str) -> Mapping[Unit, Line]:
        """Return the finished units of a point: unit -> line."""
        if not self._read:
            self.refresh()
        return self._lines.get(point, {})

    def _lock(self, byte: int, operation: int) -> bool:
        """Lock or unlock one byte of the lock file. Returns False if another process holds the lock."""
        try:
            fcntl.lockf(self._locks, operation, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            folder, words = self.file.parent, "has no locks (%s): let one process at a time evaluate there"
            logger.warning(f"the file system of %s {words}", folder, error.strerror)
        return True


class Point(ABC):
    """One row of a measurement: a task, a text or a context under one cache, a policy or the settings of a compaction.
    Its results are lines of the journal, one for each of `size` units of work.

    name, unit : the stage that a terminal shows, and a unit of work in words
    """

    name, unit = "measuring", "piece"

    def __init__(self, journal: Journal, cache: Any, size: int, *determining: Any) -> None:
        self.journal, self.cache, self.size = journal, cache, size
        self.key = point_key(*determining)

    @property
    def finished(self) -> int:
        """Number of units of work whose lines are in the journal."""
        return len(self.journal.units(self.key))

    @property
    def complete(self) -> bool:
        return self.finished == self.size

    @abstractmethod
    def measure(self, engine: Any, shown: Stage) -> None:
        """Add the missing lines to the journal, with an engine under the point's cache."""

    @abstractmethod
    def row(self) -> Any:
        """Return the row, computed from the lines alone. Requires that the point is complete."""


def progress_of(points: Sequence[Point], progress: bool) -> AbstractContextManager[Stage]:
    done, total = sum(point.finished for point in points), sum(point.size for point in points)
    return stage(points[0].name, total=total, unit=points[0].unit, shown=progress, done=done)


def measure_points(
    points: Sequence[Point],
    open_engine: Callable[[Any], AbstractContextManager[Any]],
    journal: Journal,
    on_point: Callable[[], object],
    progress: bool = True,
) -> None:
    """Measure every point that is not complete, unless another process works on it, cache by cache, because points with
    the same cache share an engine. Then take over points that another process has left incomplete.

    open_engine : function cache -> context manager of the engine for this cache
    on_point : called after work on a point
    """
    by_cache: dict[str, list[Point]] = {}
    for point in points:
        by_cache.setdefault(point_key(settings_of(point.cache)), []).append(point)
    worked = True
    with progress_of(points, progress) as shown:
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
                            point.measure(engine, shown)
                            worked = True
                        on_point()


def settings_of(cache: Policy | PromptCacheConfig) -> dict[str, Any]:
    if isinstance(cache, PromptCacheConfig):
        return as_mapping(cache)
    return {"policy": cache.name, **cache.parameters()}
