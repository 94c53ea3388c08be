"""TRL's options work under replay: every loss, every importance correction, and the KL to a reference model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, get_args

import pytest
import torch
from trl import GRPOTrainer

from trainer.grpo.config import Correction
from trainer.grpo.trainer import SparseGRPOTrainer

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]


@pytest.mark.parametrize("correction", get_args(Correction))
@pytest.mark.few(2)
def test_no_importance_correction_has_an_effect_under_replay(correction: str, metrics_of: Callable) -> None:
    """Under replay the importance ratio is 1, up to 1e-5. So there is nothing that a correction could change."""
    lines = metrics_of(importance_correction=correction)
    assert len(lines) == 2
    for line in lines:
        assert line["replay/gap_max"] <= 1e-5
        for name in ("mean", "p5", "p95", "max"):
            assert line[f"ratio/{name}"] == pytest.approx(1, abs=1e-5)
        assert line["ratio/clipped"] == 0
        if correction != "none":
            assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_control_without_replay_a_correction_clips_the_ratio(metrics_of: Callable) -> None:
    """Without replay the importance ratio is far from 1, and the correction clips it at 1.5."""
    lines = metrics_of(importance_correction="token_truncate", importance_clip=1.5, train_attention="full")
    assert all(line["ratio/p5"] < 0.9 and line["ratio/max"] > 1.5 and line["ratio/clipped"] > 0 for line in lines)
    assert all(line["sampling/importance_sampling_ratio/max"] <= 1.5 for line in lines)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.few(4)
def test_every_loss_has_a_gradient_and_a_gap_of_at_most_1e_5(loss: str, metrics_of: Callable) -> None:
    (line,) = metrics_of(loss_type=loss, max_steps=1, gradient_checkpointing=True)
    assert line["replay/gap_max"] <= 1e-5
    assert line["grad_norm"] > 0


def test_sequence_level_ratios_give_a_gradient_at_every_use(metrics_of: Callable) -> None:
    """GSPO's ratios of whole sequences give a gradient at both uses of a buffer."""
    lines = metrics_of(importance_sampling_level="sequence", num_iterations=2, epsilon_high=0.3)
    assert [line["grad_norm"] > 0 for line in lines] == [True, True]


class DenseReference(SparseGRPOTrainer):
    """A faulty trainer: the reference model attends to evicted entries too."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.rows.traces
        if model is self.ref_model:
            self.rows.traces = [trace.dense_like() for trace in kept]
        try:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        finally:
            self.rows.traces = kept


def test_the_reference_model_replays_too(metrics_of: Callable) -> None:
    """Before the first update, policy and reference model have equal weights, so the KL between them is 0. Control: if
    the reference model attends to evicted entries too, the KL exceeds 1e-3.
    """
    first, second = metrics_of(beta=0.1)
    assert first["kl"] == pytest.approx(0, abs=1e-8)
    assert second["kl"] > 1e-6
    dense, _ = metrics_of("control", beta=0.1, trainer_class=DenseReference)
    assert dense["kl"] > 1e-3


def test_with_lora_the_reference_model_replays_too(metrics_of: Callable) -> None:
    """With LoRA, the reference model is the policy without its adapter, and replays the same trace as the policy."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    first, second = metrics_of(beta=0.1, peft_config=lora, learning_rate=1e-2)
    assert first["kl"] == pytest.approx(0, abs=1e-8)
    assert second["kl"] > 1e-6


class ByTheOldPolicy(SparseGRPOTrainer):
    """Computes each loss three times: with our trainer, with TRL's formula on the old policy, and with TRL's formula on
    the old policy after top_p."""

    losses: ClassVar[list[tuple[float, float, float]]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        our_loss = super()._compute_loss(model, inputs)
        old = {name: value for name, value in inputs.items() if name != "sampling_per_token_logps"}
        others = [GRPOTrainer._compute_loss(self, model, batch) for batch in (old, inputs)]
        self.losses.append(tuple(float(loss.detach()) for loss in (our_loss, *others)))
        return our_loss


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
@pytest.mark.few(1)
def test_sequences_are_masked_by_the_old_policy(correction: str, metrics_of: Callable) -> None:
    """`off_policy_mask_threshold` masks sequences by their log-probs before the top-p cut, as TRL does without vLLM.
    Control: log-probs after the cut give other losses.
    """
    ByTheOldPolicy.losses = []
    metrics_of(
        top_p=0.5,
        off_policy_mask_threshold=0.05,
        num_iterations=2,
        importance_correction=correction,
        trainer_class=ByTheOldPolicy,
    )
    our_losses, by_old_policy, after_top_p = torch.tensor(ByTheOldPolicy.losses).T
    torch.testing.assert_close(our_losses, by_old_policy, rtol=1e-4, atol=1e-6)
    assert ((after_top_p - by_old_policy).abs() > 0.1 * by_old_policy.abs()).any()  # the control


def test_reentrant_checkpointing_is_refused(grpo: Callable) -> None:
    with pytest.raises(ValueError, match="reentrant gradient checkpointing is not supported"):
        grpo(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train_attention": "sparse"}, "train_attention: expected one of replay, full"),
        ({"importance_correction": "tis"}, "importance_correction: expected one of"),
        ({"uniform_groups": "skip"}, "uniform_groups: expected one of keep, drop"),
        ({"uniform_groups": "drop", "beta": 0.1}, "needs beta 0"),
        ({"policy": {"policy": "gkv"}}, "needs a budget"),
    ],
)
def test_invalid_settings_are_refused(settings: dict, message: str, grpo: Callable) -> None:
    with pytest.raises(ValueError, match=message):
        grpo(**settings)


def test_the_gap_in_bfloat16_is_below_the_guards_limit(metrics_of: Callable) -> None:
    """Under bfloat16 autocast, the mean gap between sampled and replayed log-probs is below 0.02; the guard's limit is
    larger.
    """
    lines = metrics_of(bf16=True)
    assert all(0 < line["replay/gap_mean"] < 0.02 and torch.isfinite(torch.tensor(line["loss"])) for line in lines)
