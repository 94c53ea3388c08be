"""What the launcher has done is not done again by the processes that it starts: a dataset is read and tokenised, and a
checkpoint hashed, once per machine.

The command keeps the results in a folder that lives as long as it does; the processes find it in the environment. One
that somebody else has started (torchrun, accelerate launch) has no such folder, and does all of it itself.
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
LAST_WORDS = "last_words"  # file of what the launcher is to say
T = TypeVar("T")


@contextmanager
def remembered() -> Iterator[None]:
    """In this block, and in the processes that are launched in it, `once` does everything once."""
    place = temporary_folder()
    if launched():  # the launcher's folder serves, which is in use as long as this process is there
        yield
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        os.environ[FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[FOLDER]


def once(what: str, make: Callable[[], T]) -> T:
    """What `make` returns; or what it returned when the launcher, or this process, asked for `what` before."""
    if FOLDER not in os.environ:
        return make()
    file = Path(os.environ[FOLDER]) / hashlib.sha256(what.encode()).hexdigest()
    if file.exists():
        return pickle.loads(file.read_bytes())
    made = make()
    if not launched():  # the processes would write over one another
        file.write_bytes(pickle.dumps(made))
    return made


def once_on_disk(what: str, make: Callable[[], Dataset]) -> Dataset:
    """The same for a dataset. All processes read the same files, so that what one of them maps the others find too."""
    import datasets

    if FOLDER not in os.environ:
        return make()

    def saved() -> str:
        place = tempfile.mkdtemp(dir=os.environ[FOLDER])
        made, shown = make(), not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            made.save_to_disk(place)
        finally:
            if shown:
                datasets.enable_progress_bars()
        return place

    return datasets.load_from_disk(once(what, saved))


def leave_words(words: str) -> bool:
    """For the launcher to say, once its processes have ended; False where there is none that will."""
    if FOLDER not in os.environ:
        return False
    with (Path(os.environ[FOLDER]) / LAST_WORDS).open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{words}\n")
    return True


def left_words() -> str:
    """What the launched processes have left to say."""
    file = Path(os.environ[FOLDER]) / LAST_WORDS
    return file.read_text(encoding="utf-8") if file.is_file() else ""
