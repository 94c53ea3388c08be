"""Log-probs of given completions, computed while whole pieces of the texts are read (teacher forcing)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from rollout.requests import NotFiniteLogprobError, Request


def given_logprobs(
    requests: Sequence[Request], pieces: Iterable[tuple[int, Tensor]], logits_of: Callable[[Tensor], Tensor], rows: int
) -> list[Tensor]:
    """Return the log-probs of each request's given completion at temperature 1: float32 [T] on the CPU for T tokens.

    pieces : for each piece of the texts, (place of its first token, hidden states [B, tokens of the piece, hidden
        size]); a text is a prompt and its completion, without the last token
    logits_of : function hidden states [M, hidden size] -> logits [M, V]
    rows : maximum number of tokens whose logits are in memory at the same time

    Raises NotFiniteLogprobError at the first log-prob that is not finite. A NaN also spoils earlier tokens of its
    piece, since 0 · NaN is NaN, so the named token may come before the cause.
    """
    given = [request.forced or [] for request in requests]
    starts = [len(request.prompt) - 1 for request in requests]  # the state of the prompt's last token predicts first
    width = max(start + len(tokens) for start, tokens in zip(starts, given, strict=True))
    targets = torch.full((len(requests), width), -1)
    for row, (start, tokens) in enumerate(zip(starts, given, strict=True)):
        targets[row, start : start + len(tokens)] = torch.tensor(tokens)
    logprobs, dtype = torch.zeros(targets.shape), ""
    for place, hidden in pieces:
        wanted = targets[:, place : place + hidden.shape[1]]
        scored = wanted >= 0
        states = hidden[:, : wanted.shape[1]][scored.to(hidden.device)]
        values = [
            logits_of(some_states).float().log_softmax(-1).gather(-1, tokens.to(hidden.device)[:, None])[:, 0]
            for some_states, tokens in zip(states.split(rows), wanted[scored].split(rows), strict=True)
            if len(tokens)
        ]
        if values:
            logprobs[:, place : place + hidden.shape[1]][scored] = torch.cat(values).cpu()
            dtype = str(hidden.dtype).removeprefix("torch.")
    result = [logprobs[row, start : start + len(given[row])] for row, start in enumerate(starts)]
    for request, row_logprobs in zip(requests, result, strict=True):
        for step, value in enumerate(row_logprobs.tolist()):
            if not math.isfinite(value):
                raise NotFiniteLogprobError(request.place, 0, step, dtype)
    return result
