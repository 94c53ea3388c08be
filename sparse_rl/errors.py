"""The errors of this project by what can be done about them, and how they suggest the nearest valid name.

    UserError      what a user can mend: one line that says what is wrong, where, and how to mend it; exit status 2
    StoppedError   what stops a run that was asked for well: one line, exit status 1; but 2 for NotFiniteError, whose
                   cause, weights or a dtype, is the user's to mend

Whatever else escapes is a fault of ours, and is shown with its traceback: so who calls a library, or a function of the
user's, turns the errors of it that a user can mend into a UserError there.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from errno import EDQUOT, EFBIG, ENOSPC
from typing import Any

LONGEST = 4000  # characters of an error's line
MOST_LISTED = 160  # characters of names that an error lists all


def one_line(text: object, most: int = LONGEST) -> str:
    """A text as one line of printable characters; of a longer one than `most` its beginning and its end."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(str(text).split()))
    return line if len(line) <= most else f"{line[: most * 3 // 4]} ... {line[len(line) - most // 5 :]}"


def reason(error: BaseException) -> str:
    """Why a library has failed: the first line of what it says, and the next where that only announces it."""
    first, _, rest = str(error).strip().partition("\n")
    first += f" {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else ""
    return one_line(
        first if isinstance(error, OSError | ValueError) and first else f"{type(error).__name__} {first}", 400
    )


def unread(error: OSError | ValueError) -> str:
    """Why a file cannot be read, for a line that names it already."""
    return (error.strerror if isinstance(error, OSError) else None) or reason(error)


class UserError(ValueError):
    """A mistake that a user can mend, in one line.

    `key` is the dotted recipe key (or the option) at fault, relative to the block that raised it; who reads the block
    prepends the rest.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(one_line(f"{key}: {message}" if key else message))
        self.message, self.key = one_line(message), key


class StoppedError(RuntimeError):
    """A run cannot go on, although what was asked for is well formed; its message says why, and what is whole."""


class NotFiniteError(StoppedError, FloatingPointError):
    """A log-prob, a loss or a score is NaN or infinite: nothing can be drawn, learned or ordered by it."""


class NotWrittenError(StoppedError):
    """`what` should have been written and was not; why, and what is whole."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} could not be written: {why}")
        self.what = what


def without_room(error: BaseException | None) -> OSError | None:
    """The error of a write that found no room (a full disk, a bound on files), where `error` is that or follows."""
    while error is not None and not (isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG)):
        error = error.__cause__ or error.__context__
    return error


def nearest(word: Any, valid: Iterable[str]) -> str | None:
    """The valid name that is most like `word`; None where none is."""
    close = difflib.get_close_matches(str(word), list(valid), n=1, cutoff=0.6)
    return close[0] if close else None


def nearest_few(word: str, valid: Iterable[str], most: int = 4) -> str:
    """The valid names that are most like `word`, the nearest first, and how many more there are."""
    alike = difflib.SequenceMatcher(b=one_line(word, 60))
    names = sorted(one_line(name, 40) for name in valid)

    def likeness(name: str) -> float:
        alike.set_seq1(name)
        return alike.ratio()

    names.sort(key=likeness, reverse=True)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def listed(valid: Iterable[str], word: Any = "") -> str:
    """Valid names, for an error; of many those that are most like `word`, and how many more there are."""
    names = list(valid)
    text = ", ".join(names)
    return text if len(text) <= MOST_LISTED else nearest_few(str(word), names)


def did_you_mean(word: Any, valid: Iterable[str]) -> str:
    """The words (did you mean 'name'?) for the nearest valid name, or nothing."""
    close = nearest(word, valid)
    return f" (did you mean {close!r}?)" if close else ""
