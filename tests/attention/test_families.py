"""Every supported family computes, with a full cache, what transformers' eager attention computes, on large queries;
everything else is refused. The gap cannot see a fault that sampler and trainer share."""

from __future__ import annotations

import copy

import pytest
import torch
from eager import eager_copy, largest_difference, plain_logprobs, sampled_logprobs, sharpened
from tiny import new_model, policy_of, prompts_of
from transformers import AutoConfig

from rollout import SamplingConfig, make_engine
from sparse_rl.attention.families import (
    FAMILIES,
    LAYER_KINDS,
    MISSING,
    NOISES,
    WINDOWED,
    check_replayable,
    check_sizes,
    windows_of,
)
from sparse_rl.attention.interface import adopt
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.errors import UserError

LENGTHS = (1, 4, 11, 28, 66)
ALWAYS_WINDOWED = ("gemma3_text", "olmo3")  # tests/tiny.py gives these families sliding windows


WINDOW = {  # sliding windows of 12 tokens in layers 0 and 2, shorter than most prompts
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 12,
    "use_sliding_window": True,
}


@pytest.mark.parametrize(
    ("family", "window"),
    [*((family, {}) for family in FAMILIES), *((family, WINDOW) for family in WINDOWED)],
    ids=lambda value: value if isinstance(value, str) else "windows" if value else "",
)
@pytest.mark.few(5)
def test_a_full_cache_computes_what_transformers_computes(family: str, window: dict) -> None:
    """Engine and trainer differ by at most twice eager attention's own error from float64, with and without sliding
    windows. Control: a window of 8 tokens gives at least 0.1."""
    own = {"no_rope_layers": [1, 0, 1, 0]} if family == "smollm3" else {}
    if family in ALWAYS_WINDOWED:
        own["layer_types"] = ["full_attention"] * 4
    model = sharpened(new_model(family, num_hidden_layers=4, **{**own, **window}))
    assert any(windows_of(model.config)) == bool(window)
    eager = eager_copy(model)
    exact = copy.deepcopy(eager).double()
    prompts, sampling = prompts_of(family, LENGTHS), SamplingConfig(30, seed=1, ignore_eos=True)
    sampled = make_engine("hf", model=model, policy=policy_of("full")).generate(prompts, sampling)
    windowed = make_engine("hf", model=model, policy=policy_of("streaming", budget=8, sinks=0, period=1))
    with torch.no_grad():
        plain = [plain_logprobs(eager, r) for r in sampled]
        own_error = largest_difference(plain, [plain_logprobs(exact, r) for r in sampled])
        assert 1e-7 < own_error < 2e-5
        assert largest_difference(plain, sampled_logprobs(sampled)) <= 2 * own_error
        assert largest_difference(plain, replay_logprobs(model, sampled)) <= 2 * own_error
        control = windowed.generate(prompts, sampling)
        assert largest_difference([plain_logprobs(eager, r) for r in control], sampled_logprobs(control)) > 0.1


@pytest.mark.parametrize("family", MISSING)
def test_a_family_that_cannot_be_replayed_is_refused_with_its_reason(family: str) -> None:
    config = type("Config", (), {"model_type": family})()
    with pytest.raises(UserError, match=f"is of type '{family}', which cannot be replayed: ") as refusal:
        check_replayable(config)
    assert MISSING[family] in str(refusal.value)
    assert family not in FAMILIES


def test_an_unknown_family_is_refused_with_the_list_of_supported_ones() -> None:
    config = AutoConfig.for_model("gpt2")
    with pytest.raises(UserError, match="of type 'gpt2', which cannot be replayed: the supported families are qwen2,"):
        check_replayable(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({"layer_types": ["full_attention", kind]}, why) for kind, why in LAYER_KINDS.items()],
        ({"layer_types": ["full_attention", "strange"]}, "it has layers of the unknown kind 'strange'"),
    ],
)
def test_settings_that_no_replay_can_follow_are_refused(settings: dict, message: str) -> None:
    """In one line. Control: without the setting, the configuration is accepted."""
    config = new_model("mistral").config
    check_replayable(config)  # control
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(UserError, match=message) as refusal:
        check_replayable(config)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", NOISES)
def test_a_model_in_memory_with_dropout_is_refused(name: str) -> None:
    """A model that is loaded gets 0 instead. Control: without the dropout, the model is accepted."""
    model = new_model("mistral")
    adopt(model)  # control
    setattr(model.config, name, 0.1)
    with pytest.raises(UserError, match=f"has {name} 0.1, and random changes cannot be replayed; set it to 0"):
        adopt(model)


def test_models_that_read_images_are_refused() -> None:
    """A family that is not in any list, but has a part for images or sound, is refused with this reason."""
    config = type("Config", (), {"model_type": "new_vl", "vision_config": {}})()
    with pytest.raises(UserError, match="it reads images or sound, and only text is supported"):
        check_replayable(config)


def test_more_experts_than_a_trace_can_number_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"num_experts is 40000 in config\.json of the model; a whole number from 0 to 32,767"
    ):
        check_sizes({"num_experts": 40_000})
    check_sizes({"num_experts": 32_767, "num_local_experts": 0})
