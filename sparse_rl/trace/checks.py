"""Checks that reject values that no sampler can have recorded. Above all, no trace may let a query see a later token.

A check gets the values of one section, all sections of the trace by name, and the number of prompt tokens (None means
unknown). It returns a description of the mistake, or None. record.py first checks shapes, dtypes and missing sections.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

NEVER = 2**30
"""Value of evict_at for a token that is never evicted; larger than any position."""


Sections = Mapping[str, Tensor]


def policy_part(sections: Sections) -> dict[str, Tensor]:
    """Return the sections that a cache policy recorded: `evict_at` of the layers without a sliding window, int32
    [layers without a window, Hkv, S], or [.., B, Hkv, S] of a batch; all other sections unchanged, without `windowed`.

    sections : name -> values of one trace, or of a batch
    """
    part = {name: values for name, values in sections.items() if name != "windowed"}
    if "windowed" in sections:
        part["evict_at"] = sections["evict_at"][sections["windowed"] == 0]
    return part


def window_evictions(window: int, length: int) -> Tensor:
    """Return evict_at of a layer with a sliding window for a sequence of `length` tokens: int32 [length].

    Query q sees the tokens after q - window, so it evicts token t = q - window.
    """
    evict_at = torch.arange(window, window + length, dtype=torch.int32)
    return evict_at.masked_fill_(evict_at >= length - 1, NEVER)


def last_query(sections: Sections) -> int:
    """Return the position of the last query: number of tokens - 2, because the last token is sampled but never fed."""
    return sections["evict_at"].shape[-1] - 2


def check_evict_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check that each token is evicted after its own position and by the last query or never."""
    if 0 in values.shape:
        return f"evict_at {list(values.shape)} is empty: a trace has at least one layer, kv head and token"
    last = last_query(sections)
    early = values <= torch.arange(values.shape[-1], dtype=torch.int32)
    late = (values > last) & (values != NEVER)
    late_rule = f"the last query is at {last}; a token that is never evicted has {NEVER}"
    for invalid, violated_rule in ((early, "a token can be evicted only after its own position"), (late, late_rule)):
        if bool(invalid.any()):
            layer, head, token = (int(i) for i in invalid.nonzero()[0])
            return f"evict_at[{layer}, {head}, {token}] = {int(values[layer, head, token])}: {violated_rule}"
    return None


def check_windowed(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check that some layer, but not every layer, has a window, and that evict_at of these layers is t + window."""
    if bool((values < 0).any()) or bool((values == 0).all()) or bool((values > 0).all()):
        return f"windowed {values.tolist()[:20]} must have windows >= 1 for some layers, and 0 for the other layers"
    evict_at = sections["evict_at"]
    for layer in values.nonzero()[:, 0].tolist():
        window = int(values[layer])
        if bool((evict_at[layer] != window_evictions(min(window, NEVER), evict_at.shape[-1])).any()):
            return f"evict_at of layer {layer} is not that of its sliding window of {window} tokens"
    return None


def check_compacted_at(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check that compacted_at is one position inside the prompt, and that all evictions are at this position."""
    evict_at = sections["evict_at"]
    length = evict_at.shape[-1] if prompt is None else prompt + 1
    if len(values) != 1 or not 0 < int(values[0]) < length:
        where = f"a sequence of {length} tokens" if prompt is None else f"a prompt of {prompt} tokens"
        return f"compacted_at {values.tolist()[:20]} is not a position in {where}"
    if bool(((evict_at != values) & (evict_at != NEVER)).any()):
        return f"a token is evicted at a position other than {int(values[0])}, the end of the compacted context"
    return None


def check_routed(values: Tensor, sections: Sections, prompt: int | None) -> str | None:
    """Check the recorded experts `routed`; return an error message, or None if they are valid.

    A layer with experts has distinct experts for every token except the last; other layers have -1 throughout.
    """
    recorded = values >= 0
    if bool((values < -1).any()) or bool((recorded.any(-1) != recorded.all(-1)).any()):
        return "routed has a token with some experts recorded and others not: either all of its experts are -1, or none"
    tokens = recorded.any(-1)  # [L, S]
    if bool(tokens[:, -1:].any()):
        return "routed has experts for the last token, which is never fed"
    partial = tokens.any(-1) & ~tokens[:, :-1].all(-1)
    if bool(partial.any()):
        layer = int(partial.nonzero()[0])
        token = int((~tokens[layer]).nonzero()[0])
        return f"routed has no experts for token {token} of layer {layer}, although this layer has experts"
    ordered = values.sort(-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
        return "routed has the same expert twice for one token"
    return None
