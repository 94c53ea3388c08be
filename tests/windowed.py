"""Plain references for models whose layers have sliding windows: one forward pass over a whole text, in which each
query attends, in float64, to the tokens and entries that a mask over positions shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from eager import sharpened
from tiny import new_model

from rollout import Rollout
from rollout.context import Context
from rollout.context.cache import LayerEntries
from sparse_rl.attention.interface import NO_MASK, KVView, adopt

WINDOW = 12
KINDS = ["sliding_attention", "full_attention"] * 2
WINDOWS = [WINDOW, 0] * 2
GLOBAL = [1, 3]  # the layers without a window


def windowed_model(family: str = "gemma3_text", **changed: Any) -> Any:
    """Return a tiny sharpened model of 4 layers, two of which have a window of 12 tokens."""
    sizes = {"num_hidden_layers": 4, "layer_types": KINDS, "sliding_window": WINDOW, **changed}
    return adopt(sharpened(new_model(family, **sizes)))


@cache
def model() -> Any:
    return windowed_model()


class Plain(KVView):
    """A `kv_view` of one forward pass over a context and the tokens that follow it.

    windows : the window of each layer, 0 for a layer without one
    entries : for each layer without a window, the entries to which the tokens after the context attend instead of the
        context's tokens; None means that they attend to all tokens
    past : number of tokens of the context
    forget : True hides the context from later tokens in layers with a window, which is wrong

    After the pass, `captured` has the queries, keys and values of each layer.
    """

    def __init__(
        self,
        windows: Sequence[int],
        entries: Sequence[LayerEntries | None] | None = None,
        past: int = 0,
        forget: bool = False,
    ) -> None:
        self.windows, self.entries, self.past, self.forget = windows, entries, past, forget
        self.captured: dict[int, tuple[torch.Tensor, ...]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        self.captured[layer] = query, key, value
        place = sum(not window for window in self.windows[:layer])
        window, group = self.windows[layer], query.shape[1] // key.shape[1]
        entries = None if window or self.entries is None else self.entries[place]
        token, out = torch.arange(key.shape[2]), torch.zeros_like(query)
        seen = token <= token[:, None]
        if window:
            seen &= token > token[:, None] - window
            if self.forget:
                seen &= (token >= self.past) | (token[:, None] < self.past)
        bias = torch.zeros(seen.shape).double().masked_fill(~seen, float("-inf"))
        for q_head in range(query.shape[1]):
            head = q_head // group
            keys, values = key[0, head].double(), value[0, head].double()
            logits = query[0, q_head].double() @ keys.T * scaling + bias
            out[0, q_head] = (logits.softmax(-1) @ values).to(out.dtype)
            if entries is None:
                continue
            own = query[0, q_head, self.past :].double()
            to_entries = own @ entries.keys[0, head].double().T * scaling + entries.bias[0, head].double()
            both = torch.cat([to_entries, logits[self.past :, self.past :]], dim=1).softmax(-1)
            values = torch.cat([entries.values[0, head].double(), values[self.past :]])
            out[0, q_head, self.past :] = (both @ values).to(out.dtype)
        return out


@torch.no_grad()
def plain_pass(
    model: Any, tokens: Sequence[int], windows: Sequence[int] = WINDOWS, *more: Any
) -> tuple[torch.Tensor, Plain]:
    """Return (log-probs [tokens, V], the view with the queries, keys and values of each layer).

    more : further arguments of Plain
    """
    view = Plain(windows, *more)
    logits = model(input_ids=torch.tensor([list(tokens)]), attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    return logits[0].log_softmax(-1), view


def plain_logprobs_after(
    model: Any,
    context: Context,
    rollout: Rollout,
    windows: Sequence[int] = WINDOWS,
    entries: Sequence[LayerEntries] | None = None,
    forget: bool = False,
) -> torch.Tensor:
    """Return the log-probs of a completion after a context by the reference.

    windows, entries, forget : those of the model and of the context, or wrong ones (Plain)
    """
    tokens = [*rollout.prompt_ids, *rollout.completion_ids]
    logprobs, _ = plain_pass(model, tokens, windows, entries or context.layers, len(context.tokens), forget)
    return of_completion(logprobs, rollout)


def of_completion(logprobs: torch.Tensor, rollout: Rollout) -> torch.Tensor:
    """Return the log-probs of a completion's tokens, from the log-probs [tokens, V] of a whole text."""
    first = len(rollout.prompt_ids)
    return logprobs[first - 1 : -1].gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0]


def plain_gap(model: Any, rollouts: Sequence[Rollout], windows: Sequence[int] = WINDOWS) -> float:
    """Return max |log-prob - sampler's log-prob| by the reference with a full cache."""
    gaps = []
    for r in rollouts:
        ours = of_completion(plain_pass(model, [*r.prompt_ids, *r.completion_ids], windows)[0], r)
        gaps.append(float((ours - torch.tensor(r.model_logprobs)).abs().max()))
    return max(gaps)
