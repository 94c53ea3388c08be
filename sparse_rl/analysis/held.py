"""The tokens that a cache holds at the end of a sequence, and their texts as pictures show them."""

from __future__ import annotations

import unicodedata
from functools import cache

import matplotlib
from matplotlib import font_manager
from torch import Tensor

from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace

FONT = "DejaVu Sans Mono"  # matplotlib contains it
MARKS = {" ": "␣", "\n": "↵", "\t": "⇥"}


def held(trace: EvictionTrace) -> Tensor:
    """Return True where the last query of a trace sees a token: bool [L, Hkv, S - 1]; the last token is never fed."""
    fed = len(trace) - 1
    return trace.evict_at[..., :fed] >= fed


def last_eviction(evict_at: Tensor) -> int | None:
    """Return the first query that ran without the tokens evicted last; None means that no token was evicted."""
    evicted = evict_at[evict_at < NEVER]
    return int(evicted.max()) if len(evicted) else None


def chosen_head(trace: EvictionTrace, layer: int | None, head: int | None) -> tuple[int, int]:
    """Return the indices of a layer and of a kv head. By default they are the last layer, and head 0.

    Raises UserError if the model has no such layer or head, or if the layer has a sliding window.
    """
    layers = trace.global_layers
    layer, head = layers[-1] if layer is None else layer, head or 0
    if layer >= trace.layers:
        raise UserError(f"the model has the layers 0 to {trace.layers - 1}", "--layer")
    if layer not in layers:
        others = ", ".join(map(str, layers))
        raise UserError(f"layer {layer} has a sliding window, which no policy changes; use {others}", "--layer")
    if head >= trace.kv_heads:
        raise UserError(f"a layer of the model has the kv heads 0 to {trace.kv_heads - 1}", "--head")
    return layer, head


# ---- texts -----------------------------------------------------------------------------------------------------------


@cache
def _drawable() -> frozenset[int]:
    """Return the code points that the font of the pictures has."""
    return frozenset(font_manager.get_font(matplotlib.get_data_path() + "/fonts/ttf/DejaVuSansMono.ttf").get_charmap())


@cache
def _shown(character: str) -> str:
    """Return a character as it is drawn, each character in one column: itself, a mark, or an escape such as \\u4f60."""
    if character in MARKS:
        return MARKS[character]
    alone = not unicodedata.combining(character) and unicodedata.bidirectional(character) not in ("R", "AL", "AN")
    if character.isprintable() and alone and ord(character) in _drawable():
        return character
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def visible(text: str) -> str:
    """Return a text in which spaces and control characters are visible, and each character takes one column.

    Characters that the font of the pictures lacks become escapes.
    """
    return "".join(map(_shown, text))


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters; an ellipsis stands for the rest."""
    return text if len(text) <= most else text[: most - 1] + "…"
