"""Learned policies of models with sliding windows: scorers exist for the global layers alone, and act on these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap
from learned import learned_policy, with_scorers, wrong_decisions
from safetensors.torch import load_file
from trainer_runs import SAMPLED, small

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.methods.kvpop.config import BoundaryConfig, TargetConfig
from sparse_rl.methods.kvpop.target import oracle_recall
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import head_of, load_model
from sparse_rl.policies import Policy, make_policy
from sparse_rl.recipe import make_recipe
from trainer.batch import Batch, Example, trace_of
from trainer.grpo.metrics import held_entries
from trainer.losses import ScorerLoss
from trainer.retrofit import GateTrainer, KVpopArguments, KVpopTrainer

NOISE = 1e-5
FOUR = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
KVPOP = {"policy": "kvpop", "budget": 12, "sinks": 2, "window": 4}
DMS = {"policy": "dms", "sinks": 2, "window": 4, "compression": 2.0, "bias": 1.0}
POLICIES = {
    "kvpop, MLP": learned_policy("mlp", 12, window=4),
    "kvpop, mLSTM": learned_policy("delayed", 12, window=4),
    "dms": make_policy(DMS),
}


@pytest.fixture
def sampled(new_model, prompts_of):
    """sampled(policy) returns a model of 4 layers, of which layers 0 and 2 have a window of 12 tokens, with scorers,
    and sequences that it samples.
    """

    def make(policy: Policy) -> tuple[Any, list[Rollout]]:
        model = with_scorers(new_model("gemma3_text", **FOUR), policy)
        engine = make_engine("hf", model=model, policy=policy)
        prompts = prompts_of("gemma3_text", (4, 11, 28))
        return model, engine.generate(prompts, SamplingConfig(30, seed=1, ignore_eos=True))

    return make


@pytest.fixture
def trainer_of(tmp_path):
    """trainer_of(model, policy, examples) returns the trainer of a retrofit, whose teacher is the model itself."""

    def make(model: Any, policy: Any, examples: list[Example]) -> KVpopTrainer:
        plain: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True}
        args = KVpopArguments(output_dir=str(tmp_path / "run"), top_k=None, **plain)
        kind = GateTrainer if policy.name == "dms" else KVpopTrainer
        return kind(model, model, policy, args, examples)

    return make


@torch.no_grad()
def logprobs_under(model: Any, view: Any, batch: Batch) -> list[torch.Tensor]:
    """Return the log-probs of each sequence's completion under a view."""
    logits = head_of(model)(batch.hidden_under(model, view)).log_softmax(-1)
    flat = logits.gather(-1, batch.targets[:, None])[:, 0]
    return list(flat.split([len(example.completion) for example in batch.examples]))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_retrofit_trains_under_the_cache_of_the_sampler(policy, sampled, trainer_of, monkeypatch):
    """Control: without the windows the gap is at least 0.1."""
    model, rollouts = sampled(policy)
    assert len(model.cache_scorers) == 2
    assert all((r.trace.policy_part().kept_counts() < len(r.trace) - 1).any() for r in rollouts)
    examples = [Example.from_rollout(r) for r in rollouts]
    trainer, batch = trainer_of(model, policy, examples), Batch.make(examples, torch.device("cpu"))
    model.eval()
    assert gap(logprobs_under(model, trainer._view(model, batch), batch), rollouts) <= NOISE
    monkeypatch.setattr("sparse_rl.attention.views.windows_of", lambda _: [99, 0, 99, 0])
    assert gap(logprobs_under(model, trainer._view(model, batch), batch), rollouts) >= 0.1


def test_scorers_learn_beside_the_recorded_windows(sampled):
    """Control: scorers of the other global layer do not decide as the sampler did."""
    policy = POLICIES["kvpop, MLP"]
    model, rollouts = sampled(policy)
    model.cache_scorers.requires_grad_(True)
    batch = Batch.make([Example.from_rollout(r) for r in rollouts], torch.device("cpu"))
    loss = ScorerLoss(policy.config, TargetConfig(), BoundaryConfig(queries=8))
    traces = [trace_of(example) for example in batch.examples]
    width = batch.ids.shape[1]
    measured, learning = (loss.view(model, *batch.sizes(), width, kernel="gather", traces=traces) for _ in range(2))
    assert gap(logprobs_under(model, measured, batch), rollouts) <= NOISE
    batch.hidden_under(model, learning)
    assert sorted(learning.of_policy.losses) == [0, 1]
    torch.stack(list(learning.of_policy.losses.values())).mean().backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.cache_scorers.parameters())
    assert decisions_agree(model, policy.config, rollouts) >= 0.999
    assert not wrong_decisions(model, policy, rollouts)[0]
    model.cache_scorers = torch.nn.ModuleList(reversed(model.cache_scorers))
    assert decisions_agree(model, policy.config, rollouts) < 0.9


def test_peaks_of_varying_counts_are_those_of_the_global_layers(sampled):
    policy = POLICIES["dms"]
    _, rollouts = sampled(policy)
    expected = []
    for rollout in rollouts:
        prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
        heads = [head for layer in (1, 3) for head in rollout.trace.evict_at[layer].tolist()]
        peaks = [max(sum(at > q for at in head[: q + 1]) for q in range(prompt, fed)) for head in heads]
        expected.append(max(prompt, math.ceil(sum(peaks) / len(peaks))))
    assert held_entries(rollouts, policy) == expected


def test_oracle_recall_is_that_of_the_global_layers(sampled):
    policy = POLICIES["kvpop, MLP"]
    model, rollouts = sampled(policy)
    trace, tokens = rollouts[2].trace, [*rollouts[2].prompt_ids, *rollouts[2].completion_ids]
    recall = oracle_recall(model, tokens, 28, trace, policy.config)
    assert recall.shape == (2, 2)
    assert (recall < 1).all()
    assert recall.mean() > 0
    assert (oracle_recall(model, tokens, 28, trace.dense_like(), policy.config) == 1).all()
    model.config.sliding_window = 99
    assert not torch.equal(oracle_recall(model, tokens, 28, trace, policy.config), recall)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache", "packing"),
    [(KVPOP, False), ({**KVPOP, "scorer": "mlstm"}, True), (DMS, False)],
    ids=["kvpop", "kvpop, mLSTM, packed", "dms"],
)
def test_a_retrofitted_model_is_saved_sampled_and_trained_further(
    cache, packing, retrofit, tiny, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    held_out = {"synthetic": {"task": "running_sum", "size": 8, "split": "evaluation"}}
    keys = {"model": tiny("gemma3_text", **FOUR), "scorer_learning_rate": 0.05, "top_k": None}
    validated = {"gradient_checkpointing": True, "validation": {"data": held_out, "every": 3}}
    final = train(retrofit(cache=cache, packing=packing, **keys, **validated))
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all(0 < line["cache/retention"] < 1 for line in lines)
    scorers = load_file(final / "cache_scorer.safetensors")
    assert {name.partition(".")[0] for name in scorers} == {"0", "1"}
    assert json.loads((final / "cache_policy.json").read_text())["policy"] == cache["policy"]
    model, engine = load_model(final), make_engine("hf", model=final)
    assert len(model.cache_scorers) == 2
    rollouts = engine.generate([list(range(3, 50)), [5, 6, 7]], SamplingConfig(40, seed=0, ignore_eos=True))
    assert gap(replay_logprobs(model, rollouts), rollouts) <= NOISE
    assert rollouts[0].trace.retention() < 1
    keys = small(str(final), tmp_path / "rl", cache=cache, max_steps=1, gradient_checkpointing=False)
    train(make_recipe({**keys, **SAMPLED["grpo"]}))
    (line,) = [line for line in read_metrics(tmp_path / "rl") if "loss" in line]
    assert line["replay/gap_max"] <= NOISE
    assert cache is DMS or line["cache/decisions_agree"] >= 0.999
