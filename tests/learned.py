"""Learned policies for the tests: scorers far from their start, and the check that decoding decides as in training.

Training computes the scores of a whole text together, and decoding computes them token by token; both are equal up to
rounding. So the record must be the plain `running_topk_reference` of the training scores, unless two priorities tie.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from topk_reference import running_topk_reference
from transformers import PreTrainedModel

from rollout import Rollout
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import ReplayView, map_of_traces
from sparse_rl.models.directory import attach_scorers, save_policy, write_scorers
from sparse_rl.policies import Policy, make_policy
from sparse_rl.trace import NEVER, EvictionTrace, batch_traces

TIE = 1e-5  # relative tolerance of a tie
SCORERS: dict[str, dict[str, Any]] = {
    "recency": {"name": "recency"},
    "linear": {"name": "linear"},
    "mlp": {"name": "mlp"},
    "delayed": {"name": "mlstm", "chunk": 16},
    "immediate": {"name": "mlstm", "readout": "immediate", "value": "full", "norm": True, "skip": True},
}


def learned_policy(scorer: str | dict[str, Any], budget: int = 20, **parameters: Any) -> Any:
    """Return a small KVpop policy; `scorer` is a name in SCORERS or a scorer's own settings."""
    block = SCORERS[scorer] if isinstance(scorer, str) else scorer
    return make_policy("kvpop", budget=budget, **{"window": 5, "sinks": 2, "scorer": block, **parameters})


def with_scorers(model: PreTrainedModel, policy: Policy, seed: int = 0, scale: float = 0.5) -> PreTrainedModel:
    """Return a copy of a model whose scorers do not rank by recency alone, and differ between heads and layers."""
    model = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attach_scorers(model, policy)  # type: ignore[arg-type]
        for weight in model.cache_scorers.parameters():
            weight.data += scale * torch.randn_like(weight)
    return adopt(model).requires_grad_(False)


def save_learned(model: PreTrainedModel, policy: Policy, folder: Any) -> None:
    """Write a retrofitted model directory: the model, its scorers and its policy."""
    model.save_pretrained(folder)
    write_scorers(folder, model.state_dict())
    save_policy(folder, policy)


class Listening(ReplayView):
    """A view that replays a trace and records each layer's queries, keys and values."""

    heard: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def attend(self, layer: int, query: Any, key: Any, value: Any, scaling: float) -> torch.Tensor:
        self.heard[layer] = query, key, value
        return super().attend(layer, query, key, value, scaling)


@torch.no_grad()
def wrong_decisions(model: PreTrainedModel, policy: Any, rollouts: Sequence[Rollout]) -> tuple[list[str], int, int]:
    """Return (clear choices that differ from the plain reference, one line of text for each; number of heads that
    differ by ties; number of all heads).

    Each layer is judged on the keys and values that it has under the recorded trace, so that a tie in one layer does
    not spread to the next.
    """
    config, wrong, ties, heads = policy.config, [], 0, 0
    for place, r in enumerate(rollouts):
        ids, prompt = torch.tensor([r.prompt_ids + r.completion_ids]), len(r.prompt_ids)
        length, part = ids.shape[1], r.trace.policy_part()
        view = Listening(batch_traces([part], [0], length), "cpu")
        view.heard = {}
        whole = map_of_traces(view, batch_traces([r.trace], [0], length), "cpu")
        model(input_ids=ids, attention_mask=NO_MASK, kv_view=whole, use_cache=False)
        for layer, (_, key, value) in view.heard.items():
            scores, log_decay = model.cache_scorers[layer](key, value, config.window)
            sizes = {"window": config.window, "k": config.k, "decay_every": config.decay_every}
            at = running_topk_reference(scores, config.sinks, log_decay=log_decay, **sizes).evict_at
            if config.prefill == "dense":
                at = at.clamp(min=prompt)
            expected = EvictionTrace.recorded(at).evict_at[0]
            recorded = part.evict_at[layer]
            ages = torch.arange(length) // config.decay_every
            priority = (scores[0] - log_decay[:, None] * ages).double()
            heads += len(recorded)
            for head in (expected != recorded).any(-1).nonzero()[:, 0].tolist():
                over = overshoot(recorded[head], priority[head], config, prompt)
                ties += over <= TIE
                wrong += [f"sequence {place}, layer {layer}, head {head}: {over:.1e}"] if over > TIE else []
    return wrong, ties, heads


def overshoot(recorded: torch.Tensor, priority: torch.Tensor, config: Any, prompt: int) -> float:
    """Return how far one head's recorded evictions are, relatively, from always dropping the worst competing token.

    inf means that the number of kept entries differs from the policy's.
    """
    worst = 0.0
    for q in sorted(set(recorded[recorded < NEVER].tolist())):
        evicted = (recorded == q).nonzero()[:, 0]
        held = torch.arange(config.sinks, q - config.window + 1)
        held = held[recorded[held] > q]
        if len(held) != config.k or int(evicted.max()) > q - config.window or (len(evicted) > 1 and q != prompt):
            return float("inf")
        low = float(priority[held].min())
        worst = max(worst, (float(priority[evicted].max()) - low) / max(abs(low), 1e-30))
    return worst
