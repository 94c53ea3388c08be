"""Values that no sampler can have recorded: each section is held against itself, the others, and its prompt.

A check takes (values of its section, all sections of the trace by name, tokens of the prompt or None where nobody knows
them), and returns the mistake in words, or None. Shapes, dtypes and the sections that belong together are checked
before (record.py). What matters most: nothing lets a query see a token that comes later.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NEVER = 2**30
"""In evict_at: no query misses the token; larger than any position."""


Sections = Mapping[str, Tensor]


def last_query(sections: Sections) -> int:
    """The position of the last query: the last token is sampled, and never fed."""
    return sections["evict_at"].shape[-1] - 2


def check_evict_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """A token sees itself, so it is evicted after its own position; and before the last query, or never."""
    if 0 in values.shape:
        return f"evict_at {list(values.shape)} is empty: a trace has a layer, a kv head and a token"
    last = last_query(sections)
    early = values <= torch.arange(values.shape[-1], dtype=torch.int32)
    late = (values > last) & (values != NEVER)
    kept = f"the last query is at {last}; a token that no query misses has {NEVER}"
    for wrong, why in ((early, "a token is evicted after its own position"), (late, kept)):
        if bool(wrong.any()):
            layer, head, token = (int(i) for i in wrong.nonzero()[0])
            return f"evict_at[{layer}, {head}, {token}] = {int(values[layer, head, token])}: {why}"
    return None


def check_compacted_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """One place in the sequence, inside its prompt; nothing is evicted at another."""
    evict_at = sections["evict_at"]
    length = evict_at.shape[-1] if prompt is None else prompt + 1
    if len(values) != 1 or not 0 < int(values[0]) < length:
        where = f"a sequence of {length} tokens" if prompt is None else f"a prompt of {prompt} tokens"
        return f"compacted_at {values.tolist()[:20]} is no place in {where}"
    if bool(((evict_at != values) & (evict_at != NEVER)).any()):
        return f"a token is evicted elsewhere than at the end of the compacted context, {int(values[0])}"
    return None
