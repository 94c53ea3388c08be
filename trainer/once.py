"""Lets launched processes reuse results that the launcher has computed: tokenised datasets, hashed checkpoints.

The launcher keeps the results in a folder that exists as long as the command runs, and passes the folder's path in an
environment variable. Processes started by torchrun or accelerate launch have no such folder, and reuse no results.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sparse_rl.temporary import temporary_folder
from trainer.launch import launched

if TYPE_CHECKING:
    from datasets import Dataset

FOLDER = "SPARSE_RL_LAUNCH_FOLDER"
LAST_WORDS = "last_words"  # file with the text that the launcher prints when it ends
T = TypeVar("T")


@contextmanager
def remembered() -> Iterator[None]:
    """Compute each result of `once` only once in this block and in the processes launched from it."""
    place = temporary_folder()
    if launched():  # the launcher's folder is used; it outlives this process
        yield
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def once(what: str, make: Callable[[], T]) -> T:
    """Return the result that the launcher has stored under the name `what`; if there is none, return make()."""
    if FOLDER not in os.environ:
        return make()
    file = Path(os.environ[FOLDER]) / hashlib.sha256(what.encode()).hexdigest()
    if file.exists():
        return pickle.loads(file.read_bytes())
    result = make()
    if not launched():  # launched processes would overwrite each other's file
        file.write_bytes(pickle.dumps(result))
    return result


def once_on_disk(what: str, make: Callable[[], Dataset]) -> Dataset:
    """Return the dataset of `make`, read from a copy on disk that all processes share.

    The library datasets caches the results of its `map` beside the copy, so the processes share these results too.
    """
    import datasets

    if FOLDER not in os.environ:
        return make()

    def saved() -> str:
        place = tempfile.mkdtemp(dir=os.environ[FOLDER])
        result, bars_shown = make(), not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            result.save_to_disk(place)
        finally:
            if bars_shown:
                datasets.enable_progress_bars()
        return place

    return datasets.load_from_disk(once(what, saved))


def leave_words(words: str) -> bool:
    """Give the launcher a text to print after its processes have ended. Return False if there is no launcher."""
    if FOLDER not in os.environ:
        return False
    with (Path(os.environ[FOLDER]) / LAST_WORDS).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{words}\n")
    return True


def left_words() -> str:
    file = Path(os.environ[FOLDER]) / LAST_WORDS
    return file.read_text(encoding="utf-8") if file.is_file() else ""
