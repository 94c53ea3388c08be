"""Cut a text file into pieces of equal token counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_rl.data.tokens import prompt_ids
from sparse_rl.errors import UserError, unread
from sparse_rl.files import MOST_TEXT, read_text


def read_pieces(path: str, tokenizer: Any, length: int, most: int | None = None) -> list[list[int]]:
    """Return the first `most` pieces of a text (None: all), of `length` tokens each. A shorter last piece is dropped.

    The whole file is tokenized in one call, so a token added at the start of a text (BOS) is only in the first piece.
    """
    try:
        text = read_text(Path(path).expanduser(), MOST_TEXT)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start + 1}); re-encode the file", "text") from error
    except (OSError, UserError) as error:
        raise UserError(f"{path} cannot be read: {unread(error)}", "text") from error
    ids = prompt_ids(text, tokenizer)
    if len(ids) < length:
        message = f"{path} has {len(ids)} tokens, but a piece needs {length}; use a longer text or fewer tokens"
        raise UserError(message, "text")
    pieces = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    return pieces[:most]
