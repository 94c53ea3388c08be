"""Log-probabilities of sampled tokens under recorded traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import NO_MASK, KVView, adopt, refuse_reentrant_checkpointing
from sparse_rl.attention.views import make_view
from sparse_rl.errors import UserError
from sparse_rl.trace import EvictionTrace, Supports


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
    truncated: bool = False,
) -> list[Tensor]:
    """Return the log-probabilities of each rollout's completion tokens, at `temperature`, under the rollout's trace.

    With the sampler's weights, these equal `Rollout.model_logprobs`, before the truncation, up to rounding. Tokens that
    a conversation read have 0, as there (`Rollout.sampled`).

    model : a causal LM of a supported family (families.py)
    rollouts : prompt_ids, completion_ids and trace, with len(trace) = prompt + completion
    temperature : the sampling temperature; 0 (greedy) is scored at 1, as in the engines' log-probabilities
    batch_size : number of sequences per forward pass, right-padded
    attention_kernel : one of ATTENTION_KERNELS
    truncated : True adds a second column, the log-probs among the recorded supports, which equal `Rollout.logprobs`;
        where none is recorded, the two columns are equal

    Returns one float32 tensor [completion tokens], or [completion tokens, 2], per rollout, with gradients if enabled.

    Raises UserError if a trace does not match its sequence or the model, has values that no sampler can have recorded
    for the prompt, or a section that no view replays; if the model is not supported, or uses reentrant checkpointing.
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
                wrong = f"a trace with layers x kv heads x tokens {list(rollout.trace.shape)}"
                have = f"the model and the sequence, which have {[layers, kv_heads, len(row)]}"
                raise UserError(f"{wrong} does not fit {have}")
            rollout.trace.check(len(rollout.prompt_ids))
        width = max(map(len, rows))
        # Pad each row with its last token: another token, such as 0, could have a NaN embedding.
        ids = torch.tensor([row + row[-1:] * (width - len(row)) for row in rows], device=device)
        view = make_view([r.trace for r in batch], [0] * len(batch), width, device, attention_kernel)
        logits = model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
        for i, rollout in enumerate(batch):
            first, end = len(rollout.prompt_ids), len(rows[i])
            scaled = logits[i, first - 1 : end - 1].float() / (temperature or 1.0)
            drawn = ids[i, first:end, None]
            logprobs = scaled.log_softmax(-1).gather(-1, drawn)[:, 0]
            if truncated:
                kept = torch.ones_like(scaled, dtype=torch.bool)
                if (supports := Supports.of([rollout.trace], model.config.vocab_size, device)) is not None:
                    place = supports.tokens - first
                    kept[place] = False
                    kept[place[supports.draws], supports.ids.long()] = True
                within = scaled.masked_fill(~kept, float("-inf")).log_softmax(-1)
                logprobs = torch.stack([logprobs, within.gather(-1, drawn)[:, 0]], dim=-1)
            read = [not sampled for sampled in getattr(rollout, "sampled", ())]
            if any(read):
                logprobs = logprobs.index_fill(0, torch.tensor(read, device=device).nonzero()[:, 0], 0.0)
            out.append(logprobs)
    return out


@torch.no_grad()
def read_under(view: KVView, model: PreTrainedModel, rollout: Sampled) -> None:
    """Run a model over the tokens of one rollout under a view, for what the view then knows."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]], device=next(model.parameters()).device)
    model.get_decoder()(input_ids=ids, attention_mask=NO_MASK.to(ids.device), kv_view=view, use_cache=False)
