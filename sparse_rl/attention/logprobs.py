"""Log-probabilities of sampled tokens under recorded traces: replay_logprobs, and the reference dense_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK, adopt, refuse_reentrant_checkpointing
from sparse_rl.attention.views.dense import DenseView
from sparse_rl.attention.views.factory import make_view
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.errors import UserError
from sparse_rl.experts.view import RoutedView
from sparse_rl.trace import EvictionTrace, policy_part


class Sampled(Protocol):
    """The attributes of a rollout that `replay_logprobs` reads."""

    prompt_ids: list[int]
    completion_ids: list[int]
    trace: EvictionTrace


def replay_logprobs(
    model: PreTrainedModel,
    rollouts: Sequence[Sampled],
    temperature: float = 1.0,
    batch_size: int = 8,
    attention_kernel: str = "gather",
) -> list[Tensor]:
    """Return the log-probabilities of each rollout's completion tokens, at `temperature`, under the rollout's trace.

    With the sampler's weights, these log-probabilities equal `Rollout.logprobs` up to rounding; this is the project's
    invariant (docs/architecture.md).

    model : a causal LM of a supported family (families.py)
    rollouts : prompt_ids, completion_ids and trace, with len(trace) = prompt + completion
    temperature : the sampling temperature; 0 (greedy) is scored at 1, as in the engines' log-probabilities
    batch_size : number of sequences per forward pass, right-padded
    attention_kernel : one of ATTENTION_KERNELS

    Returns one float32 tensor [completion tokens] per rollout, with gradients if they are enabled.

    Raises UserError if a trace does not match its sequence or the model; if it has values that no sampler can have
    recorded for the prompt; if it has a section that no view replays; if the model is not supported; or if the model
    uses reentrant checkpointing.
    """
    adopt(model)
    refuse_reentrant_checkpointing(model)
    device = next(model.parameters()).device
    layers, kv_heads, _ = cache_shape(model.config)
    out: list[Tensor] = []
    for start in range(0, len(rollouts), batch_size):
        batch = rollouts[start : start + batch_size]
        rows = [[*r.prompt_ids, *r.completion_ids] for r in batch]
        for row, rollout in zip(rows, batch, strict=True):
            if rollout.trace.shape != (layers, kv_heads, len(row)):
                raise UserError(
                    f"a trace with layers x kv heads x tokens {list(rollout.trace.shape)} does not fit "
                    f"the model and the sequence, which have {[layers, kv_heads, len(row)]}"
                )
            rollout.trace.check(len(rollout.prompt_ids))
        width = max(map(len, rows))
        # Pad each row with its last token: another token, such as 0, could have a NaN embedding.
        ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows], device=device)
        view = make_view([r.trace for r in batch], [0] * len(batch), width, device, attention_kernel)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        for i, rollout in enumerate(batch):
            first, end = len(rollout.prompt_ids), len(rows[i])
            scaled = logits[i, first - 1 : end - 1].float() / (temperature or 1.0)
            out.append(scaled.log_softmax(-1).gather(-1, ids[i, first:end, None])[:, 0])
    return out


def dense_logprobs(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    trace: EvictionTrace,
    temperature: float = 1.0,
) -> Tensor:
    """Return the log-probabilities of one completion under its trace, with dense masks: float32 [completion tokens].

    Tests compare `replay_logprobs` with this reference, whose memory grows with the square of the length.

    temperature : the sampling temperature; 0 (greedy) is scored at 1
    """
    trace.check(len(prompt_ids))
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt_ids, *completion_ids]], device=device)
    adopt(model)
    part = policy_part(trace.sections)
    further = {name: values for name, values in part.items() if name not in ("evict_at", "routed")}
    view: Any = DenseView(EvictionTrace(part["evict_at"], further, validate=trace.validate), device)
    if trace.windows:
        layers = [layer for layer, window in enumerate(trace.windows) if window]
        of_windows = DenseView(EvictionTrace(trace.evict_at[layers], validate=trace.validate), device)
        view = WindowedView(view, of_windows, trace.windows)
    if "routed" in trace.further:
        view = RoutedView(view, trace.further["routed"][:, None], device)
    logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    logits = logits[0, len(prompt_ids) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0]
