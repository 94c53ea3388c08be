"""replay_logprobs: what the trainer's model says of each sampled token, under the recorded evictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from sparse_rl.attention.interface import NO_MASK, adopt, cache_shape, refuse_reentrant_checkpointing
from sparse_rl.attention.replay import ReplayView
from sparse_rl.trace import EvictionTrace


class Sampled(Protocol):
    """What is needed of a rollout (see `rollout.Rollout`)."""

    prompt_ids: list[int]
    completion_ids: list[int]
    trace: EvictionTrace


def replay_logprobs(
    model: PreTrainedModel,
    rollouts: Sequence[Sampled],
    temperature: float = 1.0,
    batch_size: int = 8,
    attention: str = "sdpa",
) -> list[torch.Tensor]:
    """Log-probs of each rollout's completion tokens, at `temperature`, under its trace.

    The invariant (DESIGN §2): with the sampler's weights these equal `Rollout.logprobs` to floating-point noise.

    Parameters
    ----------
    model : a causal LM of the Qwen2, Qwen3 or Llama family
    rollouts : prompt_ids, completion_ids and trace, with len(trace) = prompt + completion
    temperature : the sampling temperature; 0 (greedy) is scored at 1, as the engines report it
    batch_size : sequences per forward, right-padded
    attention : the path, one of sparse_rl.attention.PATHS

    Returns
    -------
    One float32 tensor [completion] per rollout, with gradients where they are enabled.

    Raises
    ------
    ValueError
        A trace of another length or shape than the sequence or model, an unsupported model, reentrant checkpointing.
    """
    adopt(model)
    refuse_reentrant_checkpointing(model)
    device = next(model.parameters()).device
    layers, kv_heads, _ = cache_shape(model.config)
    out: list[torch.Tensor] = []
    for start in range(0, len(rollouts), batch_size):
        batch = rollouts[start : start + batch_size]
        rows = [[*r.prompt_ids, *r.completion_ids] for r in batch]
        for row, rollout in zip(rows, batch, strict=True):
            if tuple(rollout.trace.evict_at.shape) != (layers, kv_heads, len(row)):
                raise ValueError(
                    f"a trace of layers x kv heads x tokens {list(rollout.trace.evict_at.shape)} does not fit "
                    f"a model and sequence of {[layers, kv_heads, len(row)]}"
                )
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        view = ReplayView.of([r.trace for r in batch], [0] * len(batch), width, device, attention)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        for i, rollout in enumerate(batch):
            first, end = len(rollout.prompt_ids), len(rows[i])
            scaled = logits[i, first - 1 : end - 1].float() / (temperature or 1.0)
            out.append(scaled.log_softmax(-1).gather(-1, ids[i, first:end, None])[:, 0])
    return out
