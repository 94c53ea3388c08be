"""GRPO and distillation under a learned policy. The scorers are frozen or learn, and are saved; an engine whose scorers
are stale stops the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap
from learned import SCORERS, learned_policy, wrong_decisions
from safetensors.torch import load_file
from trainer_runs import SAMPLED, small, trained

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.methods.kvpop.view import decisions_agree
from sparse_rl.metrics import read_metrics
from sparse_rl.models.load import load_model
from sparse_rl.recipe import make_recipe
from trainer.config import ScorersConfig
from trainer.grpo.trainer import TracedBatch

CACHE = {"policy": "kvpop", "budget": 12, "sinks": 2, "window": 4}


def policy_of(scorer: str) -> Any:
    return learned_policy(scorer, 12, window=4)


@pytest.fixture
def recipe(learned, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def make(kind: str, scorer: str = "delayed", **keys: Any) -> Any:
        cache = {**CACHE, "scorer": SCORERS[scorer]}
        content = small(learned(policy_of(scorer)), tmp_path / "run", cache=cache, gradient_checkpointing=False)
        return make_recipe({**content, **SAMPLED[kind], **keys})

    return make


@pytest.mark.parametrize("scorer", ["mlp", "delayed"])
@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.few(1)
def test_a_run_does_not_change_frozen_scorers(kind, scorer, recipe, tmp_path):
    small_recipe = recipe(kind, scorer)
    final = train(small_recipe)
    before, after = (load_file(Path(folder) / "cache_scorer.safetensors") for folder in (small_recipe.model, final))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    start, end = (load_file(Path(folder) / "model.safetensors") for folder in (small_recipe.model, final))
    assert start.keys() == end.keys()
    assert any(not torch.equal(start[name], end[name]) for name in start)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all(0 < line["cache/retention"] < 1 for line in lines)
    if kind == "grpo":
        assert all(line["replay/gap_max"] <= 1e-5 for line in lines)
    engine, model = make_engine("hf", model=final), load_model(final)
    assert engine.policy.config == small_recipe.cache
    sampling = SamplingConfig(max_tokens=30, seed=0, ignore_eos=True)
    rollouts = engine.generate([list(range(3, 30)), [5, 6, 7]], sampling)
    assert not wrong_decisions(model, engine.policy, rollouts)[0]
    assert gap(replay_logprobs(model, rollouts), rollouts) <= 1e-5


def make_scorers_stale(trainer: Any) -> None:
    """Make each sync change one scorer weight of the engine by 1e-3."""
    load = trainer.engine.load_weights

    def load_and_change(weights: Any) -> None:
        load(weights)
        with torch.no_grad():
            next(trainer.engine.model.cache_scorers.parameters()).view(-1)[0].add_(1e-3)

    trainer.engine.load_weights = load_and_change


@pytest.fixture
def with_own_engine(grpo, learned):
    """Return a GRPO trainer whose engine has its own weights and scorers."""

    def make(name: str = "run", **settings: Any) -> Any:
        folder = learned(policy_of("mlp"))
        model, policy = load_model(folder), policy_of("mlp")
        model.cache_scorers.requires_grad_(False)
        return grpo(name, model=model, policy=policy, own_weights=folder, **settings)

    return make


def test_stale_scorers_stop_the_run(with_own_engine):
    trainer = with_own_engine()
    make_scorers_stale(trainer)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(StoppedError, match=r"the engine's scorers are not the trainer's .*stale") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_the_replay_gap_does_not_detect_stale_scorers(with_own_engine, monkeypatch):
    monkeypatch.setattr("trainer.weights.check_scorers_in", lambda *_: None)
    trainer = with_own_engine()
    make_scorers_stale(trainer)
    assert all(line["replay/gap_max"] <= 1e-5 for line in trained(trainer))


def test_a_reference_model_cannot_be_synchronised(with_own_engine):
    with pytest.raises(UserError, match="sync_ref_model: the reference model lacks the scorers"):
        with_own_engine(beta=0.1, sync_ref_model=True)


@pytest.mark.parametrize("kind", SAMPLED)
def test_invalid_recipes_are_refused(kind, recipe, tiny):
    with pytest.raises(UserError, match="has no scorers, which kvpop needs"):
        train(recipe(kind, model=tiny()))
    other = {**CACHE, "scorer": "linear"}
    with pytest.raises(UserError, match=r"cache.scorer: the scorers of .* asks for"):
        train(recipe(kind, cache=other))


def test_learning_scorers_do_not_change_the_models_gradients(recipe, learned, grpo):
    """If the scorers learn, rows begin at column 0."""
    results = []
    for scorers in (None, ScorersConfig(boundary=BoundaryConfig(queries=None))):
        model = load_model(learned(policy_of("delayed")))
        model.cache_scorers.requires_grad_(False)
        trainer = grpo(model=model, policy=policy_of("delayed"), scorers=scorers)
        trainer.create_optimizer()
        inputs = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        trainer._compute_loss(trainer.model, inputs).backward()
        results.append({name: weight.grad for name, weight in trainer.model.named_parameters()})
    frozen, learning = results
    for name, gradient in frozen.items():
        if "cache_scorers" in name:
            assert gradient is None
            assert learning[name].abs().max() > 0
        else:
            assert (gradient - learning[name]).abs().max() <= 1e-5 * max(1.0, float(gradient.abs().max())), name


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[8], [4, 4], [3, 3, 2], [7, 1]])
def test_the_scorers_learn_from_every_chunk(sizes, learned, grpo):
    """TRL may compute log-probs in chunks of rows."""
    model = load_model(learned(policy_of("delayed")))
    scorers = ScorersConfig(boundary=BoundaryConfig(queries=None))
    trainer = grpo(model=model, policy=policy_of("delayed"), scorers=scorers)
    inputs = trainer._prepare_inputs([trainer.train_dataset[i // 4] for i in range(8)])
    ids, mask = (torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], 1) for part in ("ids", "mask"))
    trainer.model.train()

    def of(rows: slice, size: int) -> Any:
        trainer.batch = TracedBatch(inputs["traces"][rows])
        keep = inputs["completion_ids"].shape[1]
        trainer._get_per_token_logps_and_entropies(trainer.model, ids[rows], mask[rows], keep, size)
        return trainer.batch.auxiliary

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    single = [of(slice(start, start + size), size) for start, size in zip(starts, sizes, strict=True)]
    whole = of(slice(0, 8), sizes[0])
    mean = sum(size / 8 * part.losses for size, part in zip(sizes, single, strict=True))
    torch.testing.assert_close(whole.losses, mean)
    assert len(sizes) == 1 or not torch.allclose(whole.losses, single[-1].losses)  # the control: the last chunk alone
    for layer, counts in whole.recalls.items():
        assert [int(count) for count in counts] == [sum(int(p.recalls[layer][i]) for p in single) for i in (0, 1)]


def test_the_logged_agreement_of_decisions_falls_if_the_engine_has_other_scorers(with_own_engine, monkeypatch):
    lines = trained(with_own_engine("right"))
    assert len(lines) == 2
    assert all(line["cache/decisions_agree"] >= 0.999 and line["replay/gap_max"] <= 1e-5 for line in lines)
    monkeypatch.setattr("trainer.weights.check_scorers_in", lambda *_: None)
    trainer = with_own_engine("wrong")
    load = trainer.engine.load_weights

    def load_and_negate(weights: Any) -> None:
        load(weights)
        for weight in trainer.engine.model.cache_scorers.parameters():
            weight.data.neg_()

    # without evictions there is no agreement
    assert decisions_agree(trainer.model, trainer.engine.policy.config, []) is None
    trainer.engine.load_weights = load_and_negate
    assert max(line["cache/decisions_agree"] for line in trained(trainer)) < 0.99
