"""The project's errors, and helpers that suggest the nearest valid name.

UserError is a mistake that the user can fix: one line with the mistake, its place and its fix; exit status 2.
StoppedError is a valid run that cannot continue: one line; exit status 1, or 2 for NotFiniteError, whose cause (weights
or dtype) the user can fix. Any other exception is a bug in this project and is shown with its traceback. Code that
calls a library or a user's function therefore converts the errors that the user can fix into UserError.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from errno import EDQUOT, EFBIG, ENOSPC
from typing import Any

LONGEST = 4000  # maximum characters in an error's line
MOST_LISTED = 160  # maximum characters of a list of valid names; of a longer list, an error shows the nearest names


def one_line(text: object, most: int = LONGEST) -> str:
    """Return a text as one line of printable characters; the middle of a text longer than `most` is left out."""
    line = " ".join(str(text).split())
    line = line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= most else f"{line[: most * 3 // 4]} ... {line[len(line) - most // 5 :]}"


def reason(error: BaseException) -> str:
    """Return the first line of a library's error message, joined with the second line if the first ends in ":"."""
    first, _, rest = str(error).strip().partition("\n")
    first += f" {rest.strip().partition(chr(10))[0]}" if first.endswith(":") else ""
    return one_line(
        first if isinstance(error, OSError | ValueError) and first else f"{type(error).__name__} {first}", 400
    )


def unread(error: OSError | ValueError) -> str:
    """Return the reason why a file cannot be read, for a message that already names the file."""
    return (error.strerror if isinstance(error, OSError) else None) or reason(error)


class UserError(ValueError):
    """A mistake that the user can fix, described in one line.

    `key` is the dotted recipe key (or the option) at fault, relative to the block that raised the error; the code that
    reads the block prepends the block's own key.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(one_line(f"{key}: {message}" if key else message))
        self.message, self.key = one_line(message), key


class StoppedError(RuntimeError):
    """A valid run that cannot continue. The message gives the reason, and says which results are complete."""


class NotFiniteError(StoppedError, FloatingPointError):
    """A log-probability, a loss or a score is NaN or infinite, so sampling, training or ranking is impossible."""


class NotWrittenError(StoppedError):
    """A file or record, `what`, could not be written. `why` gives the reason, and says which results are complete."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} could not be written: {why}")
        self.what = what


def without_room(error: BaseException | None) -> OSError | None:
    """Return the OSError behind `error` that reports a full disk, quota or file-size limit; None if there is none."""
    while error is not None and not (isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG)):
        error = error.__cause__ or error.__context__
    return error


def nearest(word: Any, valid: Iterable[str]) -> str | None:
    """Return the valid name most similar to `word`, or None if none is similar."""
    close = difflib.get_close_matches(str(word), list(valid), n=1, cutoff=0.6)
    return close[0] if close else None


def nearest_few(word: str, valid: Iterable[str]) -> str:
    """List the valid names most similar to `word`, nearest first, and count the rest."""
    names = [one_line(name, 40) for name in valid]
    few = difflib.get_close_matches(one_line(word, 60), names, n=4, cutoff=0.0)
    return ", ".join(few) + (f" and {len(names) - len(few)} more" if len(names) > len(few) else "")


def listed(valid: Iterable[str], word: Any = "") -> str:
    """List valid names for an error message. A long list is cut to the names most similar to `word`, plus a count."""
    names = list(valid)
    text = ", ".join(names)
    return text if len(text) <= MOST_LISTED else nearest_few(str(word), names)


def did_you_mean(word: Any, valid: Iterable[str]) -> str:
    close = nearest(word, valid)
    return f" (did you mean {close!r}?)" if close else ""
