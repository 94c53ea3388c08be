"""Rejected completions have advantage 0 and change nothing else; with a full cache nothing is rejected."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_runs import timeless, trained

from sparse_rl.errors import UserError
from sparse_rl.metrics import no_lesson
from trainer.config import RejectionConfig, SparseGRPOConfig
from trainer.grpo.metrics import GRPOMetrics
from trainer.grpo.trainer import SparseGRPOTrainer

DENSE: dict[str, Any] = {"train_attention": "full", "importance_correction": "token_truncate"}
ALL: dict[str, Any] = {**DENSE, "zero_truncated_advantages": False}


class Watched(SparseGRPOTrainer):
    """Records the advantages of the first batch, and the smallest ratio of each of its completions."""

    first: Any = None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        ratios = (out["old_per_token_logps"] - out["sampling_per_token_logps"]).exp()
        smallest = ratios.masked_fill(out["completion_mask"] == 0, 1.0).amin(1)
        self.first = self.first or (out["advantages"].clone(), smallest)
        return out


def test_with_a_full_cache_the_run_equals_one_without_the_key(grpo):
    def run(name: str, rejection: RejectionConfig | None) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
        trainer = grpo(name, policy="full", rejection=rejection, **ALL)
        return timeless(trained(trainer)), list(trainer.model.parameters())

    (without, ours), (with_key, theirs) = run("a", None), run("b", RejectionConfig())
    kept = [(line.pop("rejection/kept"), line.pop("rejection/kept_reward")) for line in with_key]
    assert kept == [(1.0, pytest.approx(line["reward"])) for line in without]
    assert with_key == without
    assert all(map(torch.equal, ours, theirs))


def test_rejected_completions_have_advantage_0_and_all_others_keep_theirs(grpo):
    plain = grpo("a", trainer_class=Watched, **ALL)
    trained(plain)
    advantages, smallest = plain.first
    below = float(smallest.median())
    rejecting = grpo("b", trainer_class=Watched, rejection=RejectionConfig(below=below * 1.001), **ALL)
    line = trained(rejecting)[0]
    rejected = smallest < below * 1.001
    assert 0 < int(rejected.sum()) < len(rejected)
    assert torch.equal(rejecting.first[0], advantages.masked_fill(rejected, 0.0))
    assert advantages[rejected].any(), "control: without the key they count"
    assert line["rejection/kept"] == pytest.approx(1 - float(rejected.float().mean()))
    assert line["ratio/min"] == pytest.approx(float(smallest.min()), rel=1e-5)


@pytest.mark.parametrize(
    ("below", "silent", "kept", "share", "reward"),
    [
        (1e-4, False, [True, True, False, True], 3 / 4, (1 + 4 + 6) / 3),
        (1e-2, False, [True, False, False, True], 2 / 4, (1 + 6) / 2),
        (1e-4, True, [True, True, False, True], 2 / 3, (1 + 4) / 2),  # the last one is truncated, and does not count
    ],
)
def test_a_batch_made_by_hand(below, silent, kept, share, reward):
    accelerator = SimpleNamespace(gather=lambda tensor: tensor)
    args = SimpleNamespace(sparse=SimpleNamespace(zero_truncated_advantages=silent))
    weights = torch.tensor([1.0, 2.0])
    trainer = SimpleNamespace(accelerator=accelerator, reward_weights=weights, mode="train", args=args)
    trainer._metrics = {"train": defaultdict(list)}
    ratios = torch.tensor([[1.0, 0.5, 1e-9], [1.0, 2e-3, 1.0], [5e-5, 9.0, 1.0], [1.0, 1.0, 1.0]])
    batch = {
        "sampling_per_token_logps": torch.full((4, 3), -2.0),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]]),
    }
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [8.0, 8.0], [float("nan"), 3.0]])
    rollouts = [SimpleNamespace(finish_reason=reason) for reason in ("stop", "stop", "stop", "length")]
    sampled = SimpleNamespace(logprobs=(ratios.log() - 2.0, None), rewards=rewards, rollouts=rollouts)
    assert GRPOMetrics(trainer).record_kept(batch, sampled, below).tolist() == kept
    assert trainer._metrics["train"]["rejection/kept"] == [pytest.approx(share)]
    assert trainer._metrics["train"]["rejection/kept_reward"] == [pytest.approx(reward)]


def test_a_run_that_keeps_less_than_a_tenth_is_told_to_raise_the_budget():
    reason, batches = no_lesson({"reward": 0.5, "rejection/kept": 0.09}, True) or ("", 0)
    assert "raise cache.budget" in reason
    assert batches == 5
    assert no_lesson({"reward": 0.5, "rejection/kept": 0.1}, True) is None


@pytest.mark.parametrize("change", [{"train_attention": "replay"}, {"importance_correction": "sequence_mask"}])
def test_it_needs_full_attention_and_the_correction_of_tokens(change):
    SparseGRPOConfig(rejection=RejectionConfig(), **DENSE)
    with pytest.raises(UserError, match="rejection: needs train_attention full and importance_correction token_tr"):
        SparseGRPOConfig(rejection=RejectionConfig(), **{**DENSE, **change})
    with pytest.raises(UserError, match=r"below: expected .*below 1"):
        RejectionConfig(below=1.0)
