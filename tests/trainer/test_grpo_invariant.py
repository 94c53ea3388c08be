"""The invariant, at every step of a run: trainer and sampler compute the same log-probability of a sampled token, with
every option of TRL, kernel and reference model.
"""

from __future__ import annotations

from typing import Any, ClassVar, get_args

import pytest
import torch
from trainer_runs import GKV, trained
from transformers import TrainerCallback
from trl import GRPOTrainer

from trainer.config import Correction
from trainer.grpo.trainer import SparseGRPOTrainer

NOISE = 1e-5  # float32
HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
VALIDATED = {"held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
AM = {"policy": "am", "budget": 8, "window": 3, "period": 4}
RUNS: dict[str, dict[str, Any]] = {  # run -> its settings
    "full": {"policy": {"policy": "full"}},
    "streaming": {"policy": {"policy": "streaming", "sinks": 2, "budget": 8, "period": 3}},
    "h2o": {"policy": {"policy": "h2o", "budget": 8, "period": 2}},
    "tova": {"policy": {"policy": "tova", "budget": 8}},
    "rkv": {"policy": {**GKV, "policy": "rkv"}},
    "gkv": {},
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "several steps per generation": {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 5},
    "two iterations": {"num_iterations": 2, "max_steps": 4},
    "both, checkpointing": {**HALVES, "num_iterations": 2, "gradient_checkpointing": True, "max_steps": 5},
    **{family: {"family": family, "gradient_checkpointing": True} for family in ("qwen2", "llama", "granite")},
    **{f"correction {name}": {"importance_correction": name} for name in get_args(Correction)},
    **{
        f"loss {name}": {"loss_type": name, "gradient_checkpointing": True, "max_steps": 1}
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
    },
    "windows, validated": {"family": "gemma3_text", **VALIDATED},
    "windows, fitted": {"family": "gemma3_text", "policy": AM},
    "windows, with a reference model": {"family": "gemma3_text", "beta": 0.1},
    "windows, checkpointed, buffered": {"family": "olmo3", "gradient_checkpointing": True, **HALVES},
    "temperature": {"temperature": 0.6},
}


def gaps(lines: list[dict]) -> list[float]:
    """Return replay/gap_max of the steps that sampled; a step that reuses a buffer measures no gap."""
    return [line["replay/gap_max"] for line in lines if "replay/gap_max" in line]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.few(6)
def test_the_gap_is_at_most_1e_5(name, grpo):
    """The gap is measured once for each sampling, before top-p and top-k. Then the importance ratio is 1, so that a
    correction changes nothing.
    """
    settings = RUNS[name]
    trainer = grpo(**settings)
    lines = trained(trainer)
    assert len(lines) == settings.get("max_steps", 2)
    assert max(gaps(lines)) <= NOISE
    accumulation = settings.get("gradient_accumulation_steps", 1)
    every = settings.get("steps_per_generation", accumulation) * settings.get("num_iterations", 1) // accumulation
    measured = [line for line in lines if "replay/gap_max" in line]
    assert [line["step"] for line in measured] == list(range(1, len(lines) + 1, every))
    assert all(line["grad_norm"] > 0 for line in lines)
    validations = [line for line in trainer.state.log_history if "eval_replay/gap_max" in line]
    assert len(validations) == (2 if "held_out" in settings else 0)
    assert all(line["eval_replay/gap_max"] <= NOISE for line in validations)
    for line in measured:
        assert (line["cache/retention"] < 0.95) is (name != "full")
        assert (line["cache/bytes_held"] < line["cache/bytes_full"]) is (name != "full")
        assert line["cache/bytes_full"] % (2 * 2 * 8 * 4) == 0  # K and V x kv heads x head dim x 4 bytes
        assert ("match/mass" in line) is (settings.get("policy") == AM)
        assert [line[f"ratio/{part}"] for part in ("mean", "p5", "p95", "max")] == pytest.approx([1] * 4, abs=1e-5)
        assert line["ratio/clipped"] == 0
        if settings.get("importance_correction", "none") != "none":
            assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("correction", ["none", "token_truncate"])
@pytest.mark.few(1)
def test_control_full_attention_in_training_gives_a_large_gap(correction, metrics_of):
    lines = metrics_of(train_attention="full", importance_correction=correction)
    assert len(lines) == 2
    assert min(gaps(lines)) >= 1e-3


@pytest.mark.slow
def test_a_run_does_not_depend_on_checkpointing(metrics_of):
    """The trace reaches the recomputed forward pass."""
    plain, checkpointed = (
        metrics_of(name, gradient_checkpointing=name == "checkpointed", max_steps=3)
        for name in ("plain", "checkpointed")
    )
    for a, b in zip(plain, checkpointed, strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert a["reward"] == b["reward"]


class Gradients(TrainerCallback):
    """Records the gradient of each parameter before the optimizer's step."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.of = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [pytest.param(False, id="plain"), pytest.param(True, id="checkpointed")])
def test_a_step_does_not_depend_on_the_attention_kernel(checkpointing, flex_trains, grpo):
    results = {}
    for name in ("sdpa", "gather", "flex", "flex_sorted", "dense", "full"):
        gradients = Gradients()
        options: dict[str, Any] = {"train_attention": "full"} if name == "full" else {"attention_kernel": name}
        trainer = grpo(
            name,
            max_steps=1,
            max_grad_norm=1e9,
            gradient_checkpointing=checkpointing,
            callbacks=(gradients,),
            **options,
        )
        flex_trains.clear()
        trainer.train()
        results[name] = trainer.state.log_history[0], gradients.of
        assert set(flex_trains) == {"flex": {False}, "flex_sorted": {True}}.get(name, set())

    def distance(name: str) -> float:
        pairs = [(results[name][1][key], gradient) for key, gradient in results["sdpa"][1].items()]
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    for name in ("gather", "flex", "flex_sorted", "dense"):
        for key in ("loss", "replay/gap_max", "entropy", "grad_norm"):
            assert results[name][0][key] == pytest.approx(results["sdpa"][0][key], abs=1e-5), key
        assert distance(name) <= 1e-5
    assert distance("full") > 1e-2


def test_an_unknown_kernel_is_refused(grpo):
    with pytest.raises(ValueError, match=r"^attention_kernel: must be one of auto, gather, .*, got 'flash'$"):
        grpo(attention_kernel="flash")


def test_control_without_replay_a_correction_clips_the_ratio(metrics_of):
    lines = metrics_of(importance_correction="token_truncate", importance_clip=1.5, train_attention="full")
    assert all(line["ratio/p5"] < 0.9 and line["ratio/max"] > 1.5 and line["ratio/clipped"] > 0 for line in lines)
    assert all(line["sampling/importance_sampling_ratio/max"] <= 1.5 for line in lines)
    quarters = [[line[f"ratio/p5_quarter{quarter}"] for quarter in (1, 2, 3, 4)] for line in lines]
    assert all(min(values) <= line["ratio/p5"] <= max(values) for values, line in zip(quarters, lines, strict=True))
    assert "ratio/p5_quarter1" not in metrics_of()[0]


@pytest.mark.slow
def test_sequence_level_ratios_give_a_gradient_at_every_use(metrics_of):
    lines = metrics_of(importance_sampling_level="sequence", num_iterations=2, epsilon_high=0.3)
    assert [line["grad_norm"] > 0 for line in lines] == [True, True]


class DenseReference(SparseGRPOTrainer):
    """A faulty trainer: the reference model attends to evicted entries too."""

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.batch.traces
        if model is self.ref_model:
            self.batch.traces = [trace.dense_like() for trace in kept]
        try:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        finally:
            self.batch.traces = kept


def test_the_reference_model_replays_too(metrics_of):
    """Control: if the reference model attends to evicted entries too, the KL exceeds 1e-3."""
    first, second = metrics_of(beta=0.1)
    assert first["kl"] == pytest.approx(0, abs=1e-8)
    assert second["kl"] > 1e-6
    dense, _ = metrics_of("control", beta=0.1, trainer_class=DenseReference)
    assert dense["kl"] > 1e-3


@pytest.mark.slow
def test_with_lora_the_reference_model_replays_too(metrics_of):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    first, second = metrics_of(beta=0.1, peft_config=lora, learning_rate=1e-2)
    assert first["kl"] == pytest.approx(0, abs=1e-8)
    assert second["kl"] > 1e-6


class ByTheOldPolicy(SparseGRPOTrainer):
    """Computes each loss three times: with our trainer, with TRL's formula on the old policy, and with TRL's formula on
    the sampler's log-probs before top_p."""

    losses: ClassVar[list[tuple[float, float, float]]]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        our_loss = super()._compute_loss(model, inputs)
        old = {name: value for name, value in inputs.items() if name != "sampling_per_token_logps"}
        before = {**inputs, "sampling_per_token_logps": inputs["model_per_token_logps"]}
        others = [GRPOTrainer._compute_loss(self, model, batch) for batch in (old, before)]
        self.losses.append(tuple(float(loss.detach()) for loss in (our_loss, *others)))
        return our_loss


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "token_truncate"])
def test_sequences_are_masked_by_the_old_policy(correction, metrics_of):
    """As TRL does without vLLM. Control: log-probs before the top-p cut give other losses."""
    ByTheOldPolicy.losses = []
    metrics_of(
        top_p=0.5,
        off_policy_mask_threshold=0.05,
        num_iterations=2,
        importance_correction=correction,
        trainer_class=ByTheOldPolicy,
    )
    our_losses, by_old_policy, before_top_p = torch.tensor(ByTheOldPolicy.losses).T
    torch.testing.assert_close(our_losses, by_old_policy, rtol=1e-4, atol=1e-6)
    assert ((before_top_p - by_old_policy).abs() > 0.1 * by_old_policy.abs()).any()  # the control
