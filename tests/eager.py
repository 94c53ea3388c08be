"""Log-probs of transformers' own eager attention, with which a full cache is compared."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout import Rollout

# a model has the first, or the second; some the third
SHARPENED = ("q_proj.weight", "qkv_proj.weight", "q_norm.weight")


def sharpened(model: PreTrainedModel) -> PreTrainedModel:
    """Multiply queries by 3, so that a query attends to few keys. Gemma's norms multiply by 1 + weight."""
    for name, weight in model.named_parameters():
        if name.endswith(SHARPENED):
            weight.data.mul_(3).add_(2 if name.endswith("norm.weight") and "gemma" in model.config.model_type else 0)
    return model


def eager_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model with transformers' eager attention, and its eager experts."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    eager.set_experts_implementation("eager")
    return eager


def plain_logprobs(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Return transformers' own log-probs [completion tokens] of one rollout, in the model's dtype."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    first = len(rollout.prompt_ids)
    logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[0, first:, None])[:, 0]


def sampled_logprobs(rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Return the log-probs [completion tokens] that the engine reported for each rollout."""
    return [torch.tensor(r.model_logprobs) for r in rollouts]


def largest_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def check_as_exact(eager: PreTrainedModel, rollouts: Sequence[Rollout], *computed: Sequence[Tensor]) -> None:
    """Check that log-probs are at most twice as far from float64 as those of eager attention in float32.

    Over few tokens eager's distance may happen to be small. It counts as at least the relative spacing of float32.

    computed : log-probs of the rollouts' completions, by engine and trainer
    """
    with torch.no_grad():
        plain = [plain_logprobs(eager, rollout) for rollout in rollouts]
        double = copy.deepcopy(eager).double()
        exact = [plain_logprobs(double, rollout) for rollout in rollouts]
    spacing = torch.finfo(torch.float32).eps * max(float(values.abs().max()) for values in exact)
    for ours in computed:
        assert largest_difference(ours, exact) <= 2 * max(largest_difference(plain, exact), spacing)
