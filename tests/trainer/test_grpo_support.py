"""GRPO under top-p, top-k and min-p: the trainer's policy is the truncated one that the sampler drew from.

Where the record of the kept tokens is ignored, the importance ratio is wrong by the probability mass that was cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from learned import learned_policy
from torch import Tensor
from trainer_runs import GKV, trained

from rollout import SamplingConfig, make_engine
from sparse_rl.errors import UserError
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.models.load import load_model
from sparse_rl.trace import EvictionTrace, Supports
from trainer.batch import Batch, Example
from trainer.config import ScorersConfig
from trainer.grpo.metrics import ReplayGapError
from trainer.grpo.trainer import SparseGRPOTrainer

NOISE = 1e-5  # float32
HALVES = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
VALIDATED = {"held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
OLD = {"importance_correction": "token_truncate"}
AM = {"policy": "am", "budget": 8, "window": 3, "period": 4}
KVPOP = learned_policy("mlp", 12, window=4)
RUNS: dict[str, dict[str, Any]] = {  # run -> its settings
    "top_p": {},
    "top_k": {"top_p": 1.0, "top_k": 8},
    "min_p": {"top_p": 1.0, "min_p": 0.2},
    "all three, at a low temperature": {"top_p": 0.9, "top_k": 12, "min_p": 0.02, "temperature": 0.6},
    "nearly everything kept": {"top_p": 0.999},  # more tokens than V / 32 are stored as bits
    "full cache": {"policy": {"policy": "full"}},
    "a correction of tokens": OLD,
    "a correction of sequences": {"importance_correction": "sequence_truncate"},
    "two iterations, in halves": {**HALVES, "num_iterations": 2, "max_steps": 5, **OLD},
    "a reference model": {"beta": 0.1, "learning_rate": 1e-2, **OLD},
    "checkpointed, validated": {"gradient_checkpointing": True, **VALIDATED},
    "truncated completions left out": {"mask_truncated_completions": True},
    "entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    "scaled logits": {"family": "granite"},
    "sliding windows": {"family": "gemma3_text"},
    "experts, balanced": {"family": "qwen3_moe", "router_aux_loss_coef": 0.01},
    "fitted values": {"policy": AM},
}
FAST = ("top_p", "a reference model", "two iterations, in halves", "truncated completions left out")


def gaps(lines: list[dict[str, Any]]) -> list[float]:
    return [line["support/gap_max"] for line in lines if "support/gap_max" in line]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_the_importance_ratio_is_1_where_the_kept_tokens_are_replayed(name, grpo):
    settings = {"top_p": 0.8, **RUNS[name]}
    trainer = grpo(**settings)
    lines = trained(trainer)
    measured = [line for line in lines if "support/gap_max" in line]
    assert [line["step"] for line in measured] == ([1, 5] if "num_iterations" in settings else [1, 2])
    for line in measured:
        assert line["support/gap_max"] <= NOISE
        assert line["replay/gap_max"] <= NOISE
        assert [line[f"ratio/{part}"] for part in ("mean", "p5", "p95", "max")] == pytest.approx([1] * 4, abs=1e-5)
        assert line["support/size"] >= 1
        assert 0 <= line["support/single"] < 1
        assert (0.8 if name == "top_p" else 0.1) <= line["support/mass"] < 1
        if settings.get("importance_correction", "none") != "none":
            assert line["sampling/sampling_logp_difference/max"] <= NOISE
    assert all(line["grad_norm"] > 0 for line in lines)
    validations = [line for line in trainer.state.log_history if "eval_replay/gap_max" in line]
    assert len(validations) == (2 if "held_out" in settings else 0)
    assert all(max(line["eval_support/gap_max"], line["eval_replay/gap_max"]) <= NOISE for line in validations)
    if "beta" in settings:
        assert lines[0]["kl"] == pytest.approx(0, abs=1e-8)
        assert lines[1]["kl"] > 1e-4  # the reference's pass, which comes last, has other log-probs than the guard's


@pytest.mark.parametrize("settings", [{}, OLD], ids=["measured in the loss", "measured with the old log-probs"])
@pytest.mark.few(1)
def test_control_without_the_record_the_ratio_is_off_by_the_mass_that_was_cut(settings, metrics_of, monkeypatch):
    """The guard, whose log-probs are those before truncation, sees no fault."""
    monkeypatch.setattr(Supports, "of", staticmethod(lambda *_: None))
    for line in metrics_of(top_p=0.8, **settings):
        assert line["support/gap_max"] > 0.1
        assert line["ratio/mean"] == pytest.approx(line["support/mass"], abs=1e-4)
        assert line["replay/gap_max"] <= NOISE


class Plain(SparseGRPOTrainer):
    """Computes the log-probs of kept tokens from whole logits, draw by draw, with autograd's gradients."""

    def _among_kept(self, model: Any, supports: Supports, first: Tensor, *inputs: Any) -> Any:
        out = super()._among_kept(model, supports, first, *inputs)
        ids, positions, labels, view = inputs
        unmasked = torch.zeros(1, 1, 1, 1)
        logits = model(input_ids=ids, position_ids=positions, attention_mask=unmasked, kv_view=view).logits
        grids = torch.zeros(2, *ids[:, 1:].shape)
        places = zip(supports.rows.tolist(), supports.tokens.tolist(), strict=True)
        for (row, token), kept in zip(places, supports.ids.split(supports.sizes.tolist()), strict=True):
            column = int(first[row, 0]) + token
            if labels[row, column] == -100:
                continue
            logp = (logits[row, column - 1, kept.long()] / self.temperature).log_softmax(-1)
            place = torch.zeros_like(grids)
            place[0, row, column - 1], place[1, row, column - 1] = 1, 1
            value = torch.stack([logp[kept == labels[row, column]].sum(), -(logp.exp() * logp).sum()])
            grids = grids + place * value[:, None, None]
        out.log_probs, out.entropy = grids
        return out


def gradients(trainer: Any) -> tuple[float, dict[str, Tensor]]:
    trainer.create_optimizer()
    torch.manual_seed(0)
    inputs = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    named = trainer.model.named_parameters()
    return float(loss.detach()), {name: weight.grad for name, weight in named if weight.grad is not None}


@pytest.mark.parametrize("name", ["plain", "granite, entropy rewarded", "scorers learn, rotated rows"])
@pytest.mark.few(2)
def test_the_gradients_are_those_of_whole_logits(name, grpo, learned):
    """Control: at another temperature they differ."""
    settings: dict[str, Any] = {"top_p": 0.8, "temperature": 0.7}
    if name.startswith("granite"):
        settings |= {"family": "granite", "entropy_coef": 0.5}
    results = []
    for kind, options in ((SparseGRPOTrainer, {}), (Plain, {}), (SparseGRPOTrainer, {"temperature": 0.8})):
        made = {**settings, **options, "trainer_class": kind}
        if name.startswith("scorers"):
            made |= {"model": load_model(learned(KVPOP)), "policy": KVPOP}
            made["scorers"] = ScorersConfig(boundary=BoundaryConfig(queries=None))
            made["model"].cache_scorers.requires_grad_(False)
        results.append(gradients(grpo(**made)))
    (loss, ours), (plain_loss, plain), (_, warmer) = results
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    assert ours.keys() == plain.keys()
    assert any("cache_scorers" in weight for weight in ours) is name.startswith("scorers")
    far = {weight: float((ours[weight] - plain[weight]).abs().max() / plain[weight].abs().max()) for weight in ours}
    assert max(far.values()) <= 1e-5, far
    assert max(float((warmer[w] - plain[w]).abs().max() / plain[w].abs().max()) for w in ours) > 1e-2


@pytest.mark.parametrize("settings", [{}, OLD], ids=["measured in the loss", "measured with the old log-probs"])
@pytest.mark.few(1)
def test_the_guard_stops_a_wrong_trace(settings, grpo):
    """Most draws of a trained model keep one token, whose log-prob is 0 under any weights and any trace: the guard
    compares log-probs before truncation.
    """
    trainer = grpo(top_p=0.9, **settings)
    generate = trainer.engine.generate

    def late(prompts: Any, sampling: Any) -> Any:
        rollouts = generate(prompts, sampling)
        for evict_at in (r.trace.evict_at for r in rollouts):
            evict_at.copy_(torch.where(evict_at < evict_at.shape[-1] - 2, evict_at + 1, evict_at))
        return rollouts

    trainer.engine.generate = late
    with pytest.raises(ReplayGapError, match=r"replay gap: .* beyond the limit"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_an_engine_that_records_no_supports_is_refused(grpo):
    trainer = grpo(top_p=0.9)
    generate = trainer.engine.generate
    trainer.engine.generate = lambda prompts, sampling: generate(prompts, replace(sampling, record_support=False))
    with pytest.raises(UserError, match="the engine records no supports"):
        trainer.train()


def test_full_attention_in_training_keeps_the_supports(metrics_of):
    """The gap is then that of the attention alone: the trainer's log-probs are among the kept tokens, too."""
    (line,) = metrics_of(top_p=0.8, train_attention="full", max_steps=1)
    assert line["support/gap_max"] > 1e-3
    assert line["replay/gap_max"] > 1e-3
    assert line["ratio/mean"] > line["support/mass"]


def test_distillation_takes_rollouts_with_supports(new_model, prompts_of):
    """Its loss is over the vocabulary and needs no set, also where several sequences share a row."""
    model = new_model("qwen3")
    sampling = SamplingConfig(20, top_p=0.7, seed=0, record_support=True)
    rollouts = make_engine("hf", model=model, policy=GKV).generate(prompts_of("qwen3", (4, 11, 28)), sampling)
    assert all("support" in r.trace.further for r in rollouts)
    plain = [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts]
    recorded, expected = (
        Batch.make([Example.from_rollout(r) for r in some], torch.device("cpu"), packing=True).hidden(
            model, replayed=True
        )
        for some in (rollouts, plain)
    )
    assert torch.equal(recorded, expected)


@pytest.mark.slow
def test_with_lora_the_head_has_no_gradient(grpo):
    from peft import LoraConfig

    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    lines = trained(grpo(top_p=0.8, peft_config=lora, learning_rate=1e-2, beta=0.1, **OLD))
    assert max(gaps(lines)) <= NOISE
    assert all(line["grad_norm"] > 0 for line in lines)
    assert lines[1]["kl"] > 1e-6


@pytest.mark.slow
def test_in_bfloat16_the_gap_is_rounding(metrics_of):
    lines = metrics_of(top_p=0.8, bf16=True)
    assert all(1e-4 < line["support/gap_max"] < 0.5 for line in lines)
    assert all(line["ratio/mean"] == pytest.approx(1, abs=0.02) for line in lines)
