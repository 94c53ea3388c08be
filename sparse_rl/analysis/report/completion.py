"""The data of a coloured completion: its tokens, and the time at which each kv head drops each of them.

The browser needs evict_at of all layers and kv heads. It is stored as codes: 0 for a token that stays, and otherwise
the rank of its eviction time, from 1, among all eviction times of the sequence. Codes compress well, because a policy
evicts many tokens at the same time. completion.js unpacks them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from sparse_rl.analysis.opened import records_pages, unpaged
from sparse_rl.trace import NEVER, EvictionTrace


def packed(trace: EvictionTrace, strings: Sequence[str], prompt: int) -> dict[str, Any]:
    """Return the data of one sequence of S tokens, as plain values for JSON.

    tokens : the text of each token;  prompt : number of tokens of the prompt
    layers : indices of the layers that are shown, those without a sliding window;  heads : kv heads of a layer
    times : eviction times in ascending order, as query positions
    codes : [layers][kv heads][S] in one byte or, if `wide`, two, low bytes first; deflated, in base 64
    paged : true if tokens of closed pages are read through summaries, and are shown as not held

    strings : the text of each token
    """
    shown, paged = trace.policy_part(), records_pages(trace)
    evict_at = (unpaged(shown) if paged else shown).evict_at
    times = evict_at[evict_at < NEVER].unique()
    codes = torch.searchsorted(times, evict_at.clamp(max=NEVER - 1)) + 1
    numbers = codes.masked_fill(evict_at == NEVER, 0).to(torch.int32).flatten().numpy()
    wide = len(times) > 255
    planes = (numbers & 255).astype("uint8").tobytes() + ((numbers >> 8).astype("uint8").tobytes() if wide else b"")
    return {
        "tokens": list(strings),
        "prompt": prompt,
        "layers": trace.global_layers,
        "heads": trace.kv_heads,
        "times": times.tolist(),
        "wide": wide,
        "paged": paged,
        "codes": base64.b64encode(zlib.compress(planes, 6)).decode(),
    }
