"""An engine with its own weights gets the trainer's weights after every update. A run whose engine has other weights
stops.

The engine is hf, loaded from a directory. It samples, bit for bit, the same tokens as an engine that uses the trainer's
model itself.
"""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trainer_runs import GKV, steps, timeless, trained

import rollout.hf
import trainer.export
from sparse_rl.commands.train import train
from sparse_rl.metrics import read_metrics
from sparse_rl.policies import make_policy
from sparse_rl.recipe import load_recipe, make_recipe
from trainer.config import GuardConfig
from trainer.grpo.metrics import TOLERANCES, ReplayGapError
from trainer.weights import named_weights

NOISE = 1e-5
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
ONE_PROCESS = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None), unwrap_model=lambda model: model)
VALIDATED = {"held_out": 4, "eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2}


@pytest.fixture
def with_own_engine(grpo, tiny):
    """with_own_engine(name, config={}, **settings) returns a trainer whose engine has its own weights."""

    def make(name: str = "own", config: dict[str, Any] | None = None, **settings: Any) -> Any:
        model = tiny("qwen3", **(config or {}))
        return grpo(name, model=model, own_weights=model, **settings)

    return make


def without_sync(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("sync/")} for line in timeless(lines)]


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_engine_gets_the_weights_of_every_update(tied, with_own_engine, grpo, tiny):
    config = {"tie_word_embeddings": tied}
    trainer = with_own_engine(config=config, max_steps=5)
    assert not trainer.engine.shares_weights
    assert trainer.engine.model is not trainer.model
    lines = trained(trainer)
    assert len(lines) == 5
    for line in lines:
        assert line["sync/probe_gap"] <= NOISE
        assert line["replay/gap_max"] <= NOISE
        assert line["time/sync"] > 0
    live = trained(grpo("live", model=tiny("qwen3", **config), max_steps=5))
    assert without_sync(lines) == without_sync(live)
    assert [("sync/probe_gap" in line) for line in live] == [True, False, False, False, False]  # the first probe


@pytest.mark.parametrize("policy", [{"policy": "full"}, {"policy": "tova", "budget": 4}, GKV], ids=str)
@pytest.mark.few(1)
def test_a_probe_evicts_no_entry(policy, with_own_engine):
    """With a small cache the trainer shortens the prompts to 8 tokens and the completions to 1 or 2."""
    trainer = with_own_engine(policy=policy)
    generate, probes = trainer.engine.generate, []

    def spy(prompts: Any, sampling: Any) -> Any:
        rollouts = generate(prompts, sampling)
        if sampling.ignore_eos:  # a probe
            probes.append(rollouts)
        return rollouts

    trainer.engine.generate = spy
    assert max(line["sync/probe_gap"] for line in trained(trainer)) <= NOISE
    assert len(probes) == 2
    whole, *_ = trainer._tokenize_prompts(trainer.train_dataset[:8]["prompt"])
    assert len({len(prompt) for prompt in whole}) > 1  # ragged
    cut = 0 if policy["policy"] == "full" else -8
    tokens = {"full": 20, "tova": 1, "gkv": 2}[policy["policy"]]  # 20: max_completion_length
    for probe in probes:
        assert [r.prompt_ids for r in probe] == [prompt[cut:] for prompt in whole]
        assert {len(r.completion_ids) for r in probe} == {tokens}
        assert all(bool((r.trace.evict_at >= len(r.trace) - 1).all()) for r in probe)


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        ({}, [0, 1, 2, 3]),
        ({"per_device_train_batch_size": 4, "steps_per_generation": 2}, [0, 2]),
        ({"num_iterations": 2}, [0, 2]),
        (VALIDATED, [0, 1, 2, 3, 4]),  # a validation and the step after it share one sync
    ],
    ids=["plain", "buffered", "two iterations", "validated"],
)
@pytest.mark.few(1)
def test_weights_are_handed_over_once_per_update(schedule, at, with_own_engine):
    trainer = with_own_engine(max_steps=4, **schedule)
    load, steps_of_loads = trainer.engine.load_weights, []

    def spy(weights: Any) -> None:
        steps_of_loads.append(trainer.state.global_step)
        load(weights)

    trainer.engine.load_weights = spy
    trainer.train()
    assert steps_of_loads == at
    lines = read_metrics(trainer.args.output_dir)
    assert all(line["sync/probe_gap"] <= NOISE for line in lines if "loss" in line and line["step"] - 1 in at)
    assert not any("eval_sync/probe_gap" in line for line in lines)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"train_attention": "full"}, marks=pytest.mark.slow, id="without replay"),
        pytest.param({"replay_guard": GuardConfig(enabled=False)}, marks=pytest.mark.slow, id="control"),
    ],
)
def test_stale_weights_stop_the_run(settings, with_own_engine):
    """The engine keeps its initial weights. Without replay the gap of the rollouts may be large, but not the probe's.
    Control: without the guard, the run continues with a gap that exceeds the guard's floor.
    """
    trainer = with_own_engine(max_steps=3, **settings)
    trainer.engine.load_weights = lambda weights: None
    if "replay_guard" in settings:
        lines = trained(trainer)
        assert [line["sync/probe_gap"] > TOLERANCES[torch.float32].floor for line in lines] == [False, True, True]
        return
    with pytest.raises(ReplayGapError, match=r"weight sync: .* stale or wrongly loaded weights"):
        trainer.train()
    assert [line["step"] for line in steps(trainer.args.output_dir)] == [1]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.few(1)
def test_wrong_weights_in_the_first_probe_stop_the_run(shared, with_own_engine, grpo, tiny):
    if shared:
        trainer = grpo()
        wrong_engine = rollout.hf.HFEngine(tiny("qwen3", tie_word_embeddings=True), trainer.engine.policy)
        trainer.engine.generate = wrong_engine.generate
    else:
        trainer = with_own_engine()
        load = trainer.engine.load_weights
        trainer.engine.load_weights = lambda weights: load((name, tensor * 1.05) for name, tensor in weights)
    with pytest.raises(ReplayGapError, match=r"beyond the limit 1\.00e-03"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert trainer.weight_sync.limit is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_names_equal_the_names_in_the_checkpoint(family, tied, new_model):
    model = new_model(family, tie_word_embeddings=tied)
    expected = {name: weight.clone() for name, weight in model.state_dict().items()}
    if tied:
        expected.pop("lm_head.weight")
    for wrapped in (model, get_peft_model(model, LoraConfig(**LORA))):
        names = [name for name, _ in named_weights(wrapped, ONE_PROCESS)]
        assert sorted(names) == sorted(expected)
        for name, weight in named_weights(wrapped, ONE_PROCESS):
            assert torch.equal(weight, expected[name])
            assert not weight.requires_grad


@pytest.mark.parametrize("twice", [False, True])
def test_tied_weights_may_be_loaded_under_one_name_or_two(twice, new_model, tiny):
    engine = rollout.hf.HFEngine(tiny("qwen3", tie_word_embeddings=True), make_policy("full"))
    weights = dict(named_weights(new_model("qwen3", seed=1, tie_word_embeddings=True), ONE_PROCESS))
    if twice:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    engine.load_weights(weights.items())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(engine.model.state_dict()[name], weights["model.embed_tokens.weight"])


def test_an_adapter_is_merged_into_a_copy(new_model):
    model = get_peft_model(new_model("qwen3"), LoraConfig(**LORA))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine = new_model("qwen3", seed=1)
    engine.load_state_dict(dict(named_weights(model, ONE_PROCESS)))
    ids = torch.tensor([[3, 7, 11, 5]])
    with torch.no_grad():
        torch.testing.assert_close(engine(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
        with model.disable_adapter():
            assert float((engine(ids).logits - model(ids).logits).abs().max()) > 1e-2  # the control
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def as_sleeper(engine: Any) -> list[str]:
    """Make an engine sleep like vLLM on a GPU: its weights become NaN, and loading and sampling fail during sleep.

    Return a list that collects the engine's calls in order.
    """
    calls: list[str] = []
    asleep: set[str] = set()
    load, generate = engine.load_weights, engine.generate

    def sleep(level: int) -> None:
        calls.append(f"sleep {level}")
        asleep.update(("weights", "kv_cache"))
        with torch.no_grad():
            for weight in engine.model.parameters():
                weight.fill_(float("nan"))

    def wake_up(tags: list[str]) -> None:
        calls.append(f"wake {' '.join(tags)}")
        asleep.difference_update(tags)

    def load_weights(weights: Any) -> None:
        calls.append("load")
        assert "weights" not in asleep
        load(weights)

    def sample(*arguments: Any) -> Any:
        calls.append("generate")
        assert not asleep
        return generate(*arguments)

    engine.sleep, engine.wake_up, engine.load_weights, engine.generate = sleep, wake_up, load_weights, sample
    return calls


@pytest.mark.slow
def test_an_engine_sleeps_between_samplings(with_own_engine, monkeypatch):
    """Sleep drops the weights, which return before the cache does, for a validation too."""
    logs, make = [], rollout.hf.HFEngine.__init__

    @wraps(make)
    def make_sleeper(engine: Any, *args: Any, **kwargs: Any) -> None:
        make(engine, *args, **kwargs)
        logs.append(as_sleeper(engine))

    monkeypatch.setattr(rollout.hf.HFEngine, "__init__", make_sleeper)
    awake = trained(with_own_engine("awake", max_steps=2, **VALIDATED))
    asleep = trained(with_own_engine("asleep", max_steps=2, sleep=True, **VALIDATED))
    assert set(logs[0]) == {"load", "generate"}  # without the setting the engine never sleeps
    wake_up = ["wake weights", "load", "wake kv_cache"]
    one_sampling, probe_and_sampling = [*wake_up, "generate", "sleep 2"], [*wake_up, "generate", "generate", "sleep 2"]
    assert logs[1] == ["sleep 2", *probe_and_sampling, *probe_and_sampling, *one_sampling, *probe_and_sampling]
    assert timeless(asleep) == timeless(awake)


@pytest.mark.parametrize("reward", ["digits", "problems"])
@pytest.mark.few(1)
def test_a_run_opens_one_engine_and_closes_it_last(reward, as_vllm, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.export, "export_model", lambda *_, **__: as_vllm.append("exported"))
    mapping = {
        "kind": "grpo", "model": tiny(), "output_dir": str(tmp_path), "dtype": "float32",
        "data": {"synthetic": {"task": "running_sum", "size": 64}}, "cache": GKV, "rewards": [f"trainer_runs:{reward}"],
        "max_steps": 2, "max_completion_length": 16, "save_steps": 0,
    }  # fmt: skip
    if reward == "digits":
        train(make_recipe(mapping))
        assert all(line["sync/probe_gap"] <= NOISE for line in steps(tmp_path))
        assert as_vllm == ["gkv", "exported", "closed"]
    else:
        with pytest.raises(ValueError, match=r"problems raised TypeError"):
            train(make_recipe(mapping))
        assert as_vllm == ["gkv", "closed"]
    assert load_recipe(tmp_path / "recipe.yaml").rollout.engine == "vllm"


def test_an_error_while_closing_is_only_logged(caplog):
    trainer.export.close_engine(SimpleNamespace(engine=SimpleNamespace(close=lambda: 1 // 0)))
    assert "the engine could not be closed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    trainer.export.close_engine(SimpleNamespace())
