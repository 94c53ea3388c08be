"""Reference for both engines that decodes after a compacted context, entry by entry."""

from __future__ import annotations

from typing import Any

import torch
from judging import gap
from tiny import model_of, prompts_of

from rollout import Rollout, SamplingConfig, make_engine
from rollout.context import Context
from sparse_rl.attention.interface import NO_MASK, KVView


class Slow(KVView):
    """A `kv_view` that attends entry by entry: causal attention over a context's entries, with their biases, and over
    the sequence's own tokens.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        past, out = self.context.layers[layer], torch.zeros_like(query)
        group = query.shape[1] // key.shape[1]
        for q_head in range(query.shape[1]):
            head = q_head // group
            for t in range(query.shape[2]):
                keys = torch.cat([past.keys[0, head], key[0, head, : t + 1]]).double()
                values = torch.cat([past.values[0, head], value[0, head, : t + 1]]).double()
                bias = torch.cat([past.bias[0, head], torch.zeros(t + 1)]).double()
                share = (keys @ query[0, q_head, t].double() * scaling + bias).softmax(0)
                out[0, q_head, t] = (share @ values).to(out.dtype)
        return out


def slow_logprobs(model: object, context: Context, question: list[int], completion: list[int]) -> torch.Tensor:
    """Return the log-probs [T] of a completion's T tokens after the context and a question, by the reference."""
    ids = torch.tensor([[*question, *completion]])
    positions = torch.arange(ids.shape[1])[None] + len(context.tokens)
    with torch.no_grad():
        out = model(
            input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=Slow(context), use_cache=False
        )
    logits = out.logits[0, len(question) - 1 : -1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def engine_of(name: str, **options: Any) -> Any:
    """Return an hf engine with a full cache."""
    return make_engine("hf", model=model_of(name), policy="full", **options)


def stories(*lengths: int) -> tuple[Any, ...]:
    """Return an hf engine of the story model, a context of 60 tokens, and prompts of these lengths."""
    return engine_of("stories260K"), *prompts_of("stories260K", [60, *lengths])


def check_continuation(engine: Any, context: Context, question: list[int]) -> Rollout:
    """Check that a continuation has the log-probs of the slow reference up to 1e-5, and return it."""
    (r,) = engine.generate([question], SamplingConfig(12, seed=1, ignore_eos=True), context)
    assert gap([slow_logprobs(engine.model, context, question, r.completion_ids)], [r]) <= 1e-5
    return r
