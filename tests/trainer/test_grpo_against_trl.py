"""Under a full cache our trainer equals TRL's: the same completions give the same losses, gradients and metrics.

If a new version of TRL computes something else under an option that we pass on to it, a test here fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import trl
from peft import LoraConfig
from trainer_runs import SETTINGS, digits, problems
from transformers import TrainerCallback

from sparse_rl.models.load import load_tokenizer
from trainer.config import Correction, Loss
from trainer.grpo.trainer import SparseGRPOTrainer

TOLERANCE = 1e-4  # of gradients (relative to the largest element of all gradients) and of metrics
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")

# Each generation of two batches is used twice, so that from the second step on the policy differs from the old policy.
# SGD leaves a difference in the last bits small; Adam would turn it into a whole step.
RUN: dict[str, Any] = {
    "loss_type": "grpo",
    "optim": "sgd",
    "learning_rate": 0.01,
    "steps_per_generation": 2,
    "num_iterations": 2,
    "max_steps": 3,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant",
}
BETA = {"beta": 1.0, "max_steps": 6, "learning_rate": 0.05}  # enough steps for the policy to differ from the reference
OPTIONS: dict[str, dict[str, Any]] = {
    "grpo": {},
    **{loss: {"loss_type": loss} for loss in get_args(Loss)[1:]},
    **{c: {"importance_correction": c, "importance_clip": 1.05} for c in get_args(Correction)[1:]},
    "vespo's own": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.0},
    "vespo, corrected": {"loss_type": "vespo", "importance_correction": "token_truncate"},
    "sapo's own": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "GSPO": {"importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.05},
    "luspo of sequences": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "clipped": {"epsilon": 0.01, "epsilon_high": 0.02},
    "clipped twice": {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.01},
    "beta": {**BETA},
    "beta, not corrected": {**BETA, "use_bias_correction_kl": False},
    "beta, synced": {**BETA, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    "LoRA": {"peft_config": LORA},
    "LoRA and beta": {"peft_config": LORA, "beta": 0.1},
    "scaled by batch": {"scale_rewards": "batch"},
    "not scaled": {"scale_rewards": "none"},
    "two rewards": {"reward_weights": [1.0, 0.5]},
    "two rewards, each scaled": {"reward_weights": [1.0, 0.5], "multi_objective_aggregation": "normalize_then_sum"},
    "high entropy": {"top_entropy_quantile": 0.4},
    "entropy": {"entropy_coef": 0.05},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.01},
    "off policy": {"off_policy_mask_threshold": 0.001},
    "truncated ones masked": {"mask_truncated_completions": True},
    "temperature": {"temperature": 0.7},
    "accumulated": {"gradient_accumulation_steps": 2},
    "in order and padded": {"shuffle_dataset": False, "pad_to_multiple_of": 8},
}
UNLIKE = {  # options -> the run from which theirs must differ; "grpo" if not listed
    "vespo's own": "vespo",
    "vespo, corrected": "vespo",
    "sapo's own": "sapo",
    "luspo of sequences": "luspo",
    "clipped twice": "clipped",
    "beta, not corrected": "beta",
    "beta, synced": "beta",
    "LoRA and beta": "LoRA",
    "two rewards, each scaled": "two rewards",
}


class Watch(TrainerCallback):
    """Records, for each step, the gradient of each parameter and the logged metrics."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    def on_log(self, *_: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.logged.append({n: v for n, v in logs.items() if isinstance(v, (int, float)) and "time" not in n})


class Ours(SparseGRPOTrainer):
    """Our trainer, which records its completions. If ratios are corrected, the sampler's log-probs are falsified, so
    that the correction has an effect.
    """

    sampled: list[tuple]

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.args.sparse.importance_correction != "none":
            logprobs = [[p + 0.1 * math.sin(place + len(row)) for place, p in enumerate(row)] for row in logprobs]
        self.sampled = [*getattr(self, "sampled", ()), (prompt_ids, (completions, logprobs))]
        return completions, logprobs


class Theirs(trl.GRPOTrainer):
    """TRL's own trainer, changed only to train on given completions."""

    given: Iterator[tuple]

    def _generate_single_turn(self, prompt_ids: list, *_: Any, **__: Any) -> Any:
        prompts, sampled = next(self.given)
        assert prompts == prompt_ids
        return sampled


def letters(completions: list[str], **_: Any) -> list[float]:
    return [sum(c.isalpha() for c in text) / 10 for text in completions]


def rewards_of(options: dict[str, Any]) -> list[Callable]:
    return [digits, letters] if "reward_weights" in options else [digits]


@pytest.fixture
def run_ours(grpo):
    """run_ours(options) returns the record of a run of our trainer, and the completions of this run."""

    def run(options: dict[str, Any]) -> tuple[Watch, list[tuple]]:
        watch = Watch()
        settings = {**RUN, "zero_truncated_advantages": False, "reward": rewards_of(options), **options}
        trainer = grpo(trainer_class=Ours, policy="full", callbacks=(watch,), **settings)
        trainer.train()
        return watch, trainer.sampled

    return run


@pytest.fixture
def run_trl(tiny, tmp_path):
    """run_trl(options, sampled) returns the record of TRL's run on the completions `sampled`."""

    def run(options: dict[str, Any], sampled: list[tuple]) -> Watch:
        watch = Watch()
        settings = {**SETTINGS, **RUN, **options, "output_dir": str(tmp_path / "theirs")}
        lora, correction = settings.pop("peft_config", None), settings.pop("importance_correction")
        if correction != "none":
            settings["vllm_importance_sampling_mode"] = correction
            settings["vllm_importance_sampling_clip_max"] = settings.pop("importance_clip", 2.0)
        trainer = Theirs(
            model=tiny(),
            reward_funcs=rewards_of(options),
            args=trl.GRPOConfig(**settings),
            train_dataset=problems(24),
            processing_class=load_tokenizer(tiny()),
            peft_config=lora,
            callbacks=[watch],
        )
        trainer.use_vllm = correction != "none"  # no vLLM is used: TRL reads this flag to decide on the correction
        trainer.given = iter(sampled)
        trainer.train()
        return watch

    return run


def gradient_gap(left: Watch, right: Watch) -> float:
    """Return the largest difference between the gradients of two runs over all steps, relative to the largest gradient
    element of the step."""
    gaps = []
    for step, other in zip(left.gradients, right.gradients, strict=False):
        assert step.keys() == other.keys()
        largest = max(float(gradient.abs().max()) for gradient in other.values())
        assert largest > 0
        gaps.append(max(float((step[name] - other[name]).abs().max()) for name in step) / largest)
    assert len(gaps) > 1
    return max(gaps)


def alike(left: Watch, right: Watch) -> bool:
    """True if no gradient differs by more than rounding."""
    same_steps = [one.keys() == other.keys() for one, other in zip(left.gradients, right.gradients, strict=False)]
    return all(same_steps) and gradient_gap(left, right) <= 10 * TOLERANCE


OUR_RUNS: dict[str, Watch] = {}  # our runs by name of the options, each run once


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.few(4)
def test_losses_gradients_and_metrics_equal_trls(name, run_ours, run_trl):
    result, sampled = run_ours(OPTIONS[name])
    expected = run_trl(OPTIONS[name], sampled)
    assert len(result.gradients) == len(expected.gradients)
    assert gradient_gap(result, expected) <= TOLERANCE
    for line, other in zip(result.logged, expected.logged, strict=True):
        assert {"loss", "grad_norm", "entropy"} <= other.keys() <= line.keys()
        assert {key: line[key] for key in other} == pytest.approx(other, rel=TOLERANCE, abs=TOLERANCE)
    OUR_RUNS[name] = result
    if name != "grpo":
        baseline = UNLIKE.get(name, "grpo")
        if baseline not in OUR_RUNS:
            OUR_RUNS[baseline] = run_ours(OPTIONS[baseline])[0]
        assert not alike(OUR_RUNS[baseline], result)
