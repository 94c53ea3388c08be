"""Loads a reward that the user has written, and bounds its calls: none ends the run in silence, or alters it."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import logging
import math
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from modulefinder import ModuleFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

LARGEST = 1e15  # float32 holds at most 3.4e38, and a group's standard deviation sums squares of weighted rewards
SLOW = 60  # seconds after which a line names the function that is still running


def own_reward(name: str) -> Any:
    """Load the object that a path names: mine.py:reward, or package.mine:reward, which may be written with a point.

    A module is looked up in the working directory, then among the installed ones. Errors of the user's module are
    raised unchanged; a missing file or object raises FileNotFoundError, AttributeError or ImportError.
    """
    module, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if module.endswith(".py"):
        file = Path(module).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {module}")
        return attrgetter(attribute)(_load(file, file.parent, file.stem))
    place = Path(*module.split("."))
    for file in (place / "__init__.py", Path(f"{place}.py")):
        if file.is_file():
            return attrgetter(attribute)(_load(file, Path(), module))
    return attrgetter(attribute)(importlib.import_module(module))


def source_files(name: str) -> dict[str, Path]:
    """Return the source of the module that a path names, and of those beside it that it imports (not if installed)."""
    module = name.rpartition(":" if ":" in name else ".")[0]
    file = Path(module).expanduser()
    folder, module = (file.parent, file.stem) if module.endswith(".py") else (Path(), module)
    finder = ModuleFinder([str(folder)], excludes=["sparse_rl"])
    try:
        finder.import_hook(module)
    except ImportError:
        if file.suffix != ".py":
            file = Path(getattr(importlib.import_module(module), "__file__", None) or "")
        return {module: file} if file.is_file() else {}
    files = {name: getattr(loaded, "__file__", None) for name, loaded in finder.modules.items()}
    return {name: Path(path) for name, path in files.items() if path}


def _load(file: Path, folder: Path, module: str) -> ModuleType:
    """Load a file as a module under a unique name, so that it neither hides an installed module nor is hidden by one.
    Its imports are looked up in `folder` too, after all other places."""
    file, place = file.resolve(), str(folder.resolve())
    package = ModuleType(f"from {place}".replace(".", "_"))  # allows relative imports of neighbouring files
    package.__path__ = [place]
    sys.modules.setdefault(package.__name__, package)
    name = f"{package.__name__}.{module}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(file):
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    added = place not in sys.path
    if added:
        sys.path.append(place)
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if added:
            sys.path.remove(place)
    return loaded


class Bounded:
    """A reward whose calls return checked numbers, and leave the process as it was.

    function : the reward, called as TRL calls it, with copies of its lists; it may be asynchronous
    refuse : makes the error that a call raises if the function raises anything but KeyboardInterrupt (sys.exit and
        os._exit count), or returns anything but a number from -LARGEST to LARGEST, or None, for each completion
    """

    def __init__(self, function: Callable[..., Any], refuse: Callable[[str], Exception] = ValueError) -> None:
        self.function, self.refuse = function, refuse
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.golds: tuple[str, ...] = getattr(function, "golds", ())
        self.said: set[str] = set()

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        name, count = self.__name__, len(completions)
        columns = {key: _copied(value) for key, value in {**columns, "completions": completions}.items()}
        if "log_metric" in columns:
            columns["log_metric"] = functools.partial(self._log_metric, columns["log_metric"])
        slow = f"has been scoring {count} completions for {SLOW} seconds; the run waits for it"
        try:
            with _unchanged(lambda: self._say(slow)), without_exit():
                scores = self.function(**columns)
                if inspect.iscoroutine(scores):
                    scores = asyncio.run_coroutine_threadsafe(scores, _event_loop()).result()
                if isinstance(scores, str | bytes | Mapping | Set):
                    raise TypeError(f"a list of numbers is needed, not a {type(scores).__name__}")
                scores = list(scores)
                numbers = [None if score is None else _number(score) for score in scores]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's function may raise anything
            text = " ".join("".join(traceback.format_exception_only(error)).split())
            raise self.refuse(f"{name} raised {text}") from error
        if len(scores) != count:
            raise self.refuse(f"{name} returned {len(scores)} values for {count} completions; return one for each")
        for row, number in enumerate(numbers):
            if number is not None and not abs(number) <= LARGEST:
                allowed = f"a reward is a number from {-LARGEST:g} to {LARGEST:g}, or None for an unscored completion"
                raise self.refuse(f"{name} returned {_shown(scores[row])} in row {row + 1} of {count}; {allowed}")
        return numbers

    def _log_metric(self, log: Callable[[str, float], None], name: str, value: Any) -> None:
        if isinstance(name, str) and math.isfinite(number := _number(value)):
            log(name, number)
        else:
            self._say(f"logged {_shown(value)} as {_shown(name)}; log_metric takes a name and a finite number")

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            logger.error("the reward %s %s", self.__name__, text)  # an error, because only these are shown on all ranks


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # torch raises RuntimeError
        return math.nan


def _shown(value: Any) -> str:
    return " ".join(repr(value)[:60].split())


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()  # in a thread of its own, because the caller (a notebook) may run one itself
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def without_exit() -> Iterator[None]:
    """Make os._exit raise SystemExit in this process within the block."""
    leave, process = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != process:  # a forked child
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def _unchanged(slow: Callable[[], None]) -> Iterator[None]:
    """Restore the global state of the process when the block ends. `slow` is called if the block lasts SLOW seconds."""
    torch: Any = sys.modules["torch"]  # each command that calls rewards has loaded both
    numpy: Any = sys.modules["numpy"]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with ExitStack() as stack, warnings.catch_warnings(), numpy.errstate(), torch.random.fork_rng(devices):
        restore = stack.callback  # called in reverse order
        with suppress(OSError):  # the directory was removed
            restore(os.chdir, os.getcwd())
        restore(os.environ.update, dict(os.environ))
        restore(os.environ.clear)
        restore(logging.disable, logging.root.manager.disable)
        for place in (1, 2):
            with suppress(OSError):  # it is not open
                restore(os.close, copy := os.dup(place))
                restore(os.dup2, copy, place)
        streams: set[Any] = {sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__}
        for stream in filter(None, streams | {getattr(stream, "buffer", None) for stream in streams}):
            for end in ("close", "detach"):
                setattr(stream, end, stream.flush)  # hides the method of the class
                restore(delattr, stream, end)
        for name in ("stdout", "stderr"):
            restore(setattr, sys, name, getattr(sys, name))
        for state in (random, numpy.random):
            restore(state.random)  # a draw, so that the next call sees other numbers
        restore(random.setstate, random.getstate())
        restore(numpy.random.set_state, numpy.random.get_state())
        device = torch.get_default_device()
        restore(torch.set_default_device, None if device.type == "cpu" else device)
        for name in ("default_dtype", "num_threads", "deterministic_debug_mode", "float32_matmul_precision"):
            restore(getattr(torch, f"set_{name}"), getattr(torch, f"get_{name}")())
        restore(torch.set_grad_enabled, torch.is_grad_enabled())
        if threading.current_thread() is threading.main_thread():  # an alarm also interrupts a regular expression
            restore(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, lambda *_: slow()))
            restore(signal.setitimer, signal.ITIMER_REAL, *signal.setitimer(signal.ITIMER_REAL, SLOW))
        yield
