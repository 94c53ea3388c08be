"""GRPO and distillation under a learned policy. The scorers are frozen or learn, and are saved; an engine whose scorers
are stale stops the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import gap
from learned import SCORERS, learned_policy, with_scorers, wrong_decisions
from safetensors.torch import load_file
from trainer_runs import SAMPLED, check_resumed, small, trained

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.commands.train import train
from sparse_rl.errors import StoppedError, UserError
from sparse_rl.methods.kvpop.config import BoundaryConfig
from sparse_rl.metrics import read_metrics
from sparse_rl.models.directory import save_policy, write_scorers
from sparse_rl.models.load import load_model
from sparse_rl.recipe import make_recipe
from trainer.scored.config import ScorersConfig
from trainer.scored.loss import decisions_agree

CACHE = {"policy": "kvpop", "budget": 12, "sinks": 2, "window": 4}


def policy_of(scorer: str) -> Any:
    return learned_policy(scorer, 12, window=4)


@pytest.fixture
def learned(tiny: Callable, tmp_path: Path) -> Callable[..., str]:
    """learned(scorer, seed=0) returns a model directory like the output of a retrofit, with a tokenizer."""

    def make(scorer: str, seed: int = 0) -> str:
        folder = tmp_path / f"{scorer}-{seed}"
        if not folder.exists():
            shutil.copytree(tiny(), folder)
            policy = policy_of(scorer)
            write_scorers(folder, with_scorers(load_model(folder), policy, seed).state_dict())
            save_policy(folder, policy)
        return str(folder)

    return make


@pytest.fixture
def recipe(learned: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def make(kind: str, scorer: str = "delayed", **keys: Any) -> Any:
        cache = {**CACHE, "scorer": SCORERS[scorer]}
        content = small(learned(scorer), tmp_path / "run", cache=cache, gradient_checkpointing=False)
        return make_recipe({**content, **SAMPLED[kind], **keys})

    return make


@pytest.mark.parametrize("scorer", ["mlp", "delayed"])
@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.few(1)
def test_a_run_does_not_change_frozen_scorers(kind: str, scorer: str, recipe: Callable, tmp_path: Path) -> None:
    """A run leaves the scorers equal bit for bit; the exported model samples without flags and evicts by
    these scorers."""
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


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.few(1)
def test_a_resumed_run_equals_an_uninterrupted_run(kind: str, recipe: Callable, tmp_path: Path) -> None:
    check_resumed(partial(recipe, kind), tmp_path)


def make_scorers_stale(trainer: Any) -> None:
    """Make each sync change one scorer weight of the engine by 1e-3."""
    load = trainer.engine.load_weights

    def load_and_change(weights: Any) -> None:
        load(weights)
        with torch.no_grad():
            next(trainer.engine.model.cache_scorers.parameters()).view(-1)[0].add_(1e-3)

    trainer.engine.load_weights = load_and_change


@pytest.fixture
def with_own_engine(grpo: Callable, learned: Callable) -> Callable[..., Any]:
    """Return a GRPO trainer whose engine has its own weights and scorers."""

    def make(name: str = "run", **settings: Any) -> Any:
        folder = learned("mlp")
        model, policy = load_model(folder), policy_of("mlp")
        model.cache_scorers.requires_grad_(False)
        return grpo(name, model=model, policy=policy, own_weights=folder, **settings)

    return make


def test_stale_scorers_stop_the_run(with_own_engine: Callable) -> None:
    """If one scorer weight differs from the trainer's, the run stops at the first sync, with an error that names the
    scorers.
    """
    trainer = with_own_engine()
    make_scorers_stale(trainer)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(StoppedError, match=r"the engine's scorers are not the trainer's .*stale") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)
    assert trainer.state.global_step == 0
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_the_replay_gap_does_not_detect_stale_scorers(
    with_own_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the check at the sync, a run with stale scorers continues, and its replay gap is small."""
    monkeypatch.setattr("trainer.weights.check_scorers_in", lambda *_: None)
    trainer = with_own_engine()
    make_scorers_stale(trainer)
    assert all(line["replay/gap_max"] <= 1e-5 for line in trained(trainer))


def test_current_scorers_do_not_stop_the_run(with_own_engine: Callable) -> None:
    lines = trained(with_own_engine())
    assert len(lines) == 2
    assert all(line["replay/gap_max"] <= 1e-5 for line in lines)


def test_a_reference_model_cannot_be_synchronised(with_own_engine: Callable) -> None:
    with pytest.raises(UserError, match="sync_ref_model: the reference model lacks the scorers"):
        with_own_engine(beta=0.1, sync_ref_model=True)


@pytest.mark.parametrize("kind", SAMPLED)
def test_invalid_recipes_are_refused(kind: str, recipe: Callable, tiny: Callable) -> None:
    with pytest.raises(UserError, match=r"lora: does not work with cache\.policy kvpop"):
        recipe(kind, lora={"r": 4})
    with pytest.raises(UserError, match="has no scorers, which kvpop needs"):
        train(recipe(kind, model=tiny()))
    other = {**CACHE, "scorer": "linear"}
    with pytest.raises(UserError, match=r"cache.scorer: the scorers of .* asks for"):
        train(recipe(kind, cache=other))


# ---- scorers that learn ---------------------------------------------------------------------------------------------


LEARN = {"weight": 0.5, "learning_rate": 0.01, "boundary": {"queries": 8}}


@pytest.mark.parametrize("kind", ["grpo", pytest.param("distill", marks=pytest.mark.slow)])
def test_learning_scorers_keep_the_gap_at_most_1e_5(kind: str, recipe: Callable, tmp_path: Path) -> None:
    """All scorer weights change in training, the gap is at most 1e-5, and a resumed run equals an uninterrupted one."""
    final = check_resumed(partial(recipe, kind, scorers=LEARN), tmp_path, gradient_checkpointing=True)
    start = recipe(kind).model
    before, after = (load_file(Path(folder) / "cache_scorer.safetensors") for folder in (start, final))
    assert all((before[name] != after[name]).any() for name in before)
    lines = [line for line in read_metrics(tmp_path / "whole") if "loss" in line]
    assert all(line["boundary_loss"] > 0 for line in lines)
    if kind == "grpo":
        assert all(line["replay/gap_max"] <= 1e-5 and 0 < line["cache/recall"] <= 1 for line in lines)
    with pytest.raises(UserError, match="scorers: streaming has no scorers to train"):
        recipe(kind, cache={"policy": "streaming", "budget": 12}, scorers=LEARN)


def test_learning_scorers_do_not_change_the_models_gradients(
    recipe: Callable, learned: Callable, grpo: Callable
) -> None:
    """If the scorers learn, rows begin at column 0; the log-probs and the model's gradients still equal those of the
    plain replay."""
    results = []
    for scorers in (None, ScorersConfig(boundary=BoundaryConfig(queries=None))):
        model = load_model(learned("delayed"))
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
def test_the_logged_agreement_of_decisions_falls_if_the_engine_has_other_scorers(
    with_own_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache/decisions_agree` is the share of eviction decisions in which engine and trainer agree. With equal scorers
    it is at least 0.999. If the engine's scorers are negated (and the check of the scorers is off), it is below 0.99.
    """
    shares = [line["cache/decisions_agree"] for line in trained(with_own_engine("right"))]
    assert min(shares) >= 0.999
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
