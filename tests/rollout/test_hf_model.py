"""The reference engine `hf` and its model: loading, models in memory, new weights, dtypes, train and eval mode,
errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs

GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 4}
SAMPLING = SamplingConfig(16, seed=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 20, [11, 12, 13, 14]]


def outcome(rollouts: list[Rollout]) -> list[tuple]:
    """Return tokens, log-probs and evictions of the rollouts, in a form that can be compared bit for bit."""
    return [(r.completion_ids, r.logprobs, r.model_logprobs, r.trace.evict_at.tolist()) for r in rollouts]


def sampled(model: PreTrainedModel | Path, **options: object) -> list[tuple]:
    """Return the outcome of a new engine with this model."""
    return outcome(make_engine("hf", model=model, policy=GKV, **options).generate(PROMPTS, SAMPLING))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_model_directory_gives_the_same_samples_as_the_model_in_memory(
    family: str, new_model: Callable, tmp_path: Path
) -> None:
    model = new_model(family)
    model.save_pretrained(tmp_path)
    live = sampled(model)
    assert sampled(tmp_path, device="cpu") == live == sampled(str(tmp_path), device="cpu", dtype="float32")
    assert sampled(new_model(family, seed=1)) != live


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_with_loaded_weights_samples_as_the_other_model_does(tied: bool, new_model: Callable) -> None:
    """Before `load_weights` the engine samples otherwise. If the first weights are loaded again, it samples as at
    first.
    """
    model, other_model = (new_model("qwen3", seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    engine = make_engine("hf", model=model, policy=GKV)
    expected = sampled(other_model)
    before = outcome(engine.generate(PROMPTS, SAMPLING))
    assert before != expected
    engine.load_weights(other_model.named_parameters())
    assert outcome(engine.generate(PROMPTS, SAMPLING)) == expected
    engine.load_weights(new_model("qwen3", tie_word_embeddings=tied).state_dict().items())
    assert outcome(engine.generate(PROMPTS, SAMPLING)) == before


def test_wrong_weights_are_refused(new_model: Callable) -> None:
    engine = make_engine("hf", model=new_model("qwen3"), policy=GKV)
    with pytest.raises(ValueError, match=r"no weight 'model\.nothing'"):
        engine.load_weights([("model.nothing", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \[32\], got \[1\]"):
        engine.load_weights([("model.norm.weight", torch.zeros(1))])


def test_a_change_of_the_models_weights_takes_effect_immediately(new_model: Callable) -> None:
    """The engine samples from the model in memory itself, without a copy of the weights."""
    model = new_model("qwen3")
    engine = make_engine("hf", model=model, policy=GKV)
    before = outcome(engine.generate(PROMPTS, SAMPLING))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    after = outcome(engine.generate(PROMPTS, SAMPLING))
    assert after != before
    assert after == sampled(model)


@pytest.mark.parametrize("training", [True, False])
def test_the_models_mode_is_restored(training: bool, new_model: Callable) -> None:
    """`generate` leaves the model in the mode that it had: train mode with gradient checkpointing, or eval mode. This
    also holds after an error. Samples are the same in both modes.
    """
    model = new_model("qwen3")
    expected = sampled(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train(training)
    engine = make_engine("hf", model=model, policy=GKV)
    rollouts = engine.generate(PROMPTS, SAMPLING)
    assert outcome(rollouts) == expected
    assert all(module.training is training for module in model.modules())
    assert replay_logprobs(model, rollouts)[0].requires_grad

    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="gkv: a NaN score in layer 1"):
        engine.generate(PROMPTS, SAMPLING)
    assert all(module.training is training for module in model.modules())


def test_the_gap_in_bfloat16_is_between_1e_5_and_1(
    new_model: Callable, tmp_path: Path, record_property: Callable
) -> None:
    """In bfloat16 the gap between sampler and replay exceeds 1e-5, the bound in float32, but it is finite and
    below 1.
    """
    new_model("qwen3").save_pretrained(tmp_path)
    engine = make_engine("hf", model=tmp_path, policy=GKV, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    rollouts = engine.generate(PROMPTS, SAMPLING)
    with torch.no_grad():
        replayed = replay_logprobs(engine.model, rollouts)
    gap = max(
        float((ours - torch.tensor(r.model_logprobs)).abs().max()) for ours, r in zip(replayed, rollouts, strict=True)
    )
    record_property("bf16 gap", gap)
    assert math.isfinite(gap)
    assert 1e-5 < gap < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "sglang"}, "unknown engine 'sglang'"),
        ({"policy": "g-kv"}, "unknown cache policy 'g-kv'.*did you mean 'gkv'"),
        ({"policy": "gkv"}, "needs a budget"),
        ({"policy": {**GKV, "bugdet": 3}}, "no parameter 'bugdet'.*did you mean 'budget'"),
        ({"policy": {**GKV, "window": 12}}, "must exceed window"),
        ({"max_batch": 0}, "max_batch must be >= 1"),
        ({"dtype": "float99"}, "float99"),
        ({"max_bach": 3}, "max_bach"),
    ],
    ids=lambda case: str(case) if isinstance(case, dict) else "",
)
def test_invalid_arguments_of_make_engine_are_refused(
    options: dict, message: str, new_model: Callable, tmp_path: Path
) -> None:
    """Every user mistake raises a ValueError that names the mistake."""
    model = new_model("qwen3")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_engine(**{"kind": "hf", "model": tmp_path, "policy": GKV, **options})


def test_an_unsupported_model_is_refused(new_model: Callable) -> None:
    model = new_model("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout 0\.1, and random changes cannot be replayed"):
        make_engine("hf", model=model, policy=GKV)


def test_close_frees_the_model(new_model: Callable) -> None:
    engine = make_engine("hf", model=new_model("qwen3"), policy=GKV)
    engine.close()
    assert not hasattr(engine, "model")
