"""Advantages and gradients equal those computed by hand: for truncated outputs, for groups without variance, and for
rewards that are None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_runs import digits, trained

from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError
from trainer.grpo.trainer import SparseGRPOTrainer


class Watched(SparseGRPOTrainer):
    """Records the scored completions, and the gradients of the last step before clipping."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.rewards = super()._calculate_rewards(*args, **kwargs)
        return self.rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        self.advantages = out["advantages"].clone()
        self.rollouts = self.batch.rollouts
        self.truncated = torch.tensor([r.finish_reason == "length" for r in self.rollouts])
        return out

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.gradients = [p.grad.clone() for p in self.model.parameters()]
        return loss

    def by_hand(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of the mean, over the rows `kept`, of -A_i mean_t p / p_old: A_i is the advantage of row
        i, and p and p_old are the new and old probabilities of its tokens t (G-KV eq. 6 where p = p_old)."""
        advantages = normalised(self.rewards[:, 0], self.num_generations).masked_fill(self.truncated, 0.0)
        logprobs = replay_logprobs(self.model, self.rollouts, self.temperature)
        per_row = [-a * (lp - lp.detach()).exp().mean() for a, lp in zip(advantages, logprobs, strict=True)]
        loss = torch.stack([row for row, keep in zip(per_row, kept, strict=True) if keep]).mean()
        return list(torch.autograd.grad(loss, list(self.model.parameters())))


class Compared(Watched):
    """Computes the gradients by hand at the end of the first step, while the weights still equal the sampler's."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        groups = self.rewards[:, 0].view(-1, self.num_generations)
        varied = (groups != groups[:, :1]).any(1)
        rows = varied.repeat_interleave(self.num_generations)
        assert rows.any(), "the batch must hold both kinds of group"
        assert not rows.all(), "the batch must hold both kinds of group"
        self.over_varied, self.over_all = self.by_hand(rows), self.by_hand(torch.ones_like(rows))
        return loss


def normalised(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return (r - mean) / (std + 1e-4) of the rewards r in each group, with Bessel's correction of std as in TRL, and 0
    in groups whose rewards are all equal."""
    groups = rewards.view(-1, group)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return advantages.masked_fill((groups == groups[:, :1]).all(1, keepdim=True), 0.0).flatten()


def half_uniform(constant: float) -> Callable[..., list[float]]:
    """Return a reward function that varies in every other group and has the value `constant` in the
    remaining groups."""

    def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
        uniform = sorted(set(prompts))[::2]
        return [constant if p in uniform else r for p, r in zip(prompts, digits(completions), strict=True)]

    return reward


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.few(1)
def test_zero_truncated_advantages_sets_the_advantages_of_truncated_outputs_to_zero(zeroed, grpo):
    """Their rewards still count in the mean and standard deviation of their group."""
    trainer = grpo(trainer_class=Watched, max_steps=1, zero_truncated_advantages=zeroed)
    trained(trainer)
    expected = normalised(trainer.rewards[:, 0], 4)
    assert trainer.truncated.any()
    assert not trainer.truncated.all()
    assert (expected != 0).all()
    if zeroed:
        expected = expected.masked_fill(trainer.truncated, 0.0)
    torch.testing.assert_close(trainer.advantages, expected, rtol=1e-4, atol=1e-6)
    assert list(trainer._logs["advantages"]) == trainer.advantages.tolist(), "TRL's table shows what is trained on"


# In float32 the mean of six values 0.9 is not 0.9.
@pytest.mark.parametrize(("constant", "accumulation"), [(0.0, 1), (0.9, 1), (1.0, 2)])
@pytest.mark.few(1)
def test_drop_leaves_groups_without_variance_out_of_the_gradient(constant, accumulation, grpo):
    settings = {"per_device_train_batch_size": 12 // accumulation, "gradient_accumulation_steps": accumulation}
    for choice in ("drop", "keep"):
        trainer = grpo(
            choice,
            trainer_class=Compared,
            reward=half_uniform(constant),
            uniform_groups=choice,
            num_generations=6,
            max_steps=1,
            **settings,
        )
        lines = trained(trainer)
        assert lines[0]["frac_reward_zero_std"] == 0.5
        assert list(trainer._logs["advantages"]) == trainer.advantages.tolist()
        expected, other = trainer.over_varied, trainer.over_all
        if choice == "keep":
            expected, other = other, expected
        difference = [float((a - b).norm() / b.norm()) for a, b in zip(trainer.gradients, expected, strict=True)]
        assert max(difference) < 1e-4  # float32; 2e-6 measured
        assert max(float((a - b).norm() / b.norm()) for a, b in zip(trainer.gradients, other, strict=True)) > 0.3


def test_without_any_variance_the_gradient_is_zero(metrics_of):
    (line,) = metrics_of(reward=lambda completions, **_: [1.0] * len(completions), uniform_groups="drop", max_steps=1)
    assert line["grad_norm"] == 0
    assert line["frac_reward_zero_std"] == 1


def test_a_reward_of_none_is_left_out_of_the_group(grpo):
    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [r if i % 4 else None for i, r in enumerate(digits(completions))]

    trainer = grpo(trainer_class=Watched, reward=reward, max_steps=1, zero_truncated_advantages=False)
    (line,) = trained(trainer)
    rewards = trainer.rewards.view(-1, 4)
    assert rewards[:, 0].isnan().all()
    assert not rewards[:, 1:].isnan().any()
    advantages = trainer.advantages.view(-1, 4)
    assert (advantages[:, 0] == 0).all()
    torch.testing.assert_close(
        advantages[:, 1:].flatten(), normalised(rewards[:, 1:].flatten(), 3), rtol=1e-3, atol=1e-5
    )
    assert line["reward"] == pytest.approx(float(rewards[:, 1:].mean()), rel=1e-5)


def test_rewards_that_are_all_none_give_no_gradient(metrics_of):
    (line,) = metrics_of(reward=lambda completions, **_: [None] * len(completions), max_steps=1)
    assert line["grad_norm"] == 0


def test_a_reward_that_raises_ends_the_run_with_one_line(grpo):
    def picky(completions: list[str], **_: Any) -> list[float]:
        raise ValueError("no such column:\nanswer")

    trainer = grpo(reward=[digits, picky])
    with pytest.raises(UserError, match=r"picky.*ValueError") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="returned 1 rewards, but 8"):
        grpo(reward=lambda completions, **_: [1.0]).train()
