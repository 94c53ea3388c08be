"""Log-probs of given completions from one forward pass of the hf engine, without evictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rollout.context import Context, ContextCache
from rollout.requests import NotFiniteLogprobError, requests_to_simulate


def logprobs(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    context: Context | None,
) -> list[list[float]]:
    """Implement `HFEngine.logprobs`; `engine` is the engine."""
    model = engine.model
    requests, _ = requests_to_simulate(prompts, completions, 1.0, model.config.vocab_size, context)
    if context is not None:
        engine.check_context(context)
    device, results = next(model.parameters()).device, list[list[float]]()
    for start in range(0, len(requests), engine.max_batch):
        rows = [(r.prompt, list(r.forced or ())) for r in requests[start : start + engine.max_batch]]
        lengths = [len(prompt) + len(completion) - 1 for prompt, completion in rows]
        # Padding repeats a row's last token, because another token may have a NaN embedding.
        ids = [[*p, *c[:-1], *c[-1:] * (max(lengths) - n)] for (p, c), n in zip(rows, lengths, strict=True)]
        cache = ContextCache(context)
        cache.begin_prefill(lengths, device)
        places = torch.arange(max(lengths), device=device)[None] + cache.past
        with engine._sampling():
            hidden = engine._hidden(torch.tensor(ids, device=device), places.expand(len(rows), -1), cache)
            for row, (prompt, completion) in enumerate(rows):
                logits = engine._logits(hidden[row, len(prompt) - 1 : lengths[row]]).float()
                index = torch.tensor(completion, device=device)[:, None]
                results.append(logits.log_softmax(-1).gather(-1, index)[:, 0].tolist())
        for row, values in enumerate(results[start:]):
            if wrong := [step for step, value in enumerate(values) if not math.isfinite(value)]:
                dtype = str(hidden.dtype).removeprefix("torch.")
                raise NotFiniteLogprobError(start + row, 0, wrong[0], dtype)
    return results
