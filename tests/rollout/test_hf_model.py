"""The reference engine `hf` and its model: loading, models in memory, new weights, dtypes, train and eval mode,
errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judging import outcome, trainer_gap
from tiny import new_model
from transformers import PreTrainedModel

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.logprobs import replay_logprobs

GKV = {"policy": "gkv", "budget": 12, "window": 4, "period": 4}
SAMPLING = SamplingConfig(16, seed=0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9] * 20, [11, 12, 13, 14]]


def sampled(model: PreTrainedModel | Path, **options: object) -> list[tuple]:
    return outcome(make_engine("hf", model=model, policy=GKV, **options).generate(PROMPTS, SAMPLING))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_model_directory_gives_the_same_samples_as_the_model_in_memory(family: str, tmp_path: Path) -> None:
    model = new_model(family)
    model.save_pretrained(tmp_path)
    live = sampled(model)
    assert sampled(tmp_path, device="cpu") == live == sampled(str(tmp_path), device="cpu", dtype="float32")
    assert sampled(new_model(family, seed=1)) != live


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_with_loaded_weights_samples_as_the_other_model_does(tied: bool) -> None:
    """If the first weights are loaded again, it samples as at first."""
    model, other_model = (new_model("qwen3", seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    engine = make_engine("hf", model=model, policy=GKV)
    expected = sampled(other_model)
    before = outcome(engine.generate(PROMPTS, SAMPLING))
    assert before != expected
    engine.load_weights(other_model.named_parameters())
    assert outcome(engine.generate(PROMPTS, SAMPLING)) == expected
    engine.load_weights(new_model("qwen3", tie_word_embeddings=tied).state_dict().items())
    assert outcome(engine.generate(PROMPTS, SAMPLING)) == before


def test_wrong_weights_are_refused() -> None:
    engine = make_engine("hf", model=new_model("qwen3"), policy=GKV)
    with pytest.raises(ValueError, match=r"no weight 'model\.nothing'"):
        engine.load_weights([("model.nothing", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \[32\], got \[1\]"):
        engine.load_weights([("model.norm.weight", torch.zeros(1))])


def test_a_change_of_the_models_weights_takes_effect_immediately() -> None:
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
def test_the_models_mode_is_restored(training: bool) -> None:
    """Also after an error. Samples are the same in train mode with checkpointing and in eval mode."""
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


def test_the_gap_in_bfloat16_is_between_1e_5_and_1(tmp_path: Path) -> None:
    new_model("qwen3").save_pretrained(tmp_path)
    engine = make_engine("hf", model=tmp_path, policy=GKV, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    rollouts = engine.generate(PROMPTS, SAMPLING)
    assert 1e-5 < trainer_gap(engine.model, rollouts) < 1


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
def test_invalid_arguments_of_make_engine_are_refused(options: dict, message: str, tmp_path: Path) -> None:
    model = new_model("qwen3")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        make_engine(**{"kind": "hf", "model": tmp_path, "policy": GKV, **options})


def test_an_unsupported_model_is_refused() -> None:
    model = new_model("llama", attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout 0\.1, and random changes cannot be replayed"):
        make_engine("hf", model=model, policy=GKV)


def test_close_frees_the_model() -> None:
    engine = make_engine("hf", model=new_model("qwen3"), policy=GKV)
    engine.close()
    assert not hasattr(engine, "model")
