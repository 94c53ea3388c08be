"""After the same prompt, a policy keeps the same entries as the press of the library kvpress that has the same score.

transformers no longer hands `cache_position` to the attention layers, so the tests pass it to kvpress's forward
hook. Presses with an equal policy here:

    StreamingLLMPress                                                                 streaming
    TOVAPress, which never drops the last token                                       tova with window 1
    ObservedAttentionPress, before its division by the number of observers and heads  h2o after the prompt
    SnapKVPress without pooling, one query head per kv head (it averages over them)   morphkv, snapkv without pooling

kvpress has no MorphKV, R-KV, G-KV or CAKE.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from feeding import CPU
from tiny import new_model
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.policies import Policy, make_policy
from sparse_rl.policies.cache import EvictingCache

PROMPT = 40
FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def kvpress() -> Iterator[Any]:
    """Provide kvpress without the wrappers that its import puts around transformers' attention functions."""
    assert isinstance(ALL_ATTENTION_FUNCTIONS, AttentionInterface)
    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    module = pytest.importorskip("kvpress")
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    yield module


def tiny_model(family: str, kv_heads: int = 2) -> torch.nn.Module:
    model = new_model(family, num_key_value_heads=kv_heads)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "embed" in name:
                weight.mul_(8.0)  # attention that is not flat
    return model


def prompt_ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, PROMPT), generator=torch.Generator().manual_seed(1))


def keys_kept_by(model: torch.nn.Module, press: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return, for each layer, the keys that the press keeps [2, Hkv, K, D] and all prompt keys [2, Hkv, P, D]."""
    all_keys: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        all_keys.append(kwargs["past_key_values"].layers[module.layer_idx].keys.clone())
        return press.forward_hook(module, args, {**kwargs, "cache_position": torch.arange(PROMPT)}, output)

    cache = DynamicCache()
    hooks = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(prompt_ids(), past_key_values=cache)
    for handle in hooks:
        handle.remove()
    return [layer.keys for layer in cache.layers], all_keys


def our_cache(model: torch.nn.Module, policy: Policy) -> EvictingCache:
    implementation = model.config._attn_implementation
    cache = EvictingCache(policy)
    cache.begin_prefill([PROMPT] * 2, CPU)
    with torch.no_grad():
        adopt(model)(prompt_ids(), attention_mask=NO_MASK, kv_view=cache, use_cache=False)
    model.set_attn_implementation(implementation)
    return cache


def positions(kept: torch.Tensor, all_keys: torch.Tensor) -> list[list[list[int]]]:
    """Return the prompt position of each kept key in [2, Hkv, K, D], sorted, for each row and head."""
    same = (kept[:, :, :, None] - all_keys[:, :, None]).abs().amax(-1)  # [2, Hkv, K, P]
    assert float(same.amin(-1).max()) < 1e-5
    return same.argmin(-1).sort(-1).values.tolist()


def assert_same_entries(model: torch.nn.Module, press: Any, policy: Policy) -> None:
    """Check that press and policy keep the same positions of the same prompt, in every layer, row and kv head."""
    kept, all_keys = keys_kept_by(model, press)
    cache = our_cache(model, policy)
    for index, layer in cache.layers.items():
        assert kept[index].shape[2] == policy.config.budget
        theirs = positions(kept[index], all_keys[index])
        assert layer.positions[:, :, : policy.config.budget].tolist() == theirs, f"layer {index}"


def ratio(budget: int) -> float:
    """Return the share of tokens to drop at which the press, which rounds down, keeps `budget` tokens of the prompt."""
    return 1 - (budget + 0.5) / PROMPT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "sinks"), [(12, 4), (20, 0), (17, 1)])
def test_streaming_keeps_the_entries_of_streaming_llm_press(kvpress: Any, family: str, budget: int, sinks: int) -> None:
    press = kvpress.StreamingLLMPress(ratio(budget), n_sink=sinks)
    model = tiny_model(family)
    assert_same_entries(model, press, make_policy("streaming", budget=budget, sinks=sinks))
    with pytest.raises(AssertionError, match="layer 0"):  # control: another number of sinks
        assert_same_entries(model, press, make_policy("streaming", budget=budget, sinks=sinks + 2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [8, 21])
def test_tova_keeps_the_entries_of_tova_press(kvpress: Any, family: str, budget: int) -> None:
    press, model = kvpress.TOVAPress(ratio(budget)), tiny_model(family)
    assert_same_entries(model, press, make_policy("tova", budget=budget, window=1))
    with pytest.raises(AssertionError, match="layer 0"):  # control: another window
        assert_same_entries(model, press, make_policy("tova", budget=budget, window=7))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "options"), [("morphkv", {}), ("snapkv", {"pooling": 1}), ("cake", {"gamma": 0})])
def test_the_local_score_keeps_the_entries_of_snapkv_press(
    kvpress: Any, family: str, name: str, options: dict[str, int]
) -> None:
    """Without pooling (SnapKV) and variance (CAKE), the score is SnapKVPress's attention of the window's queries."""
    press, model = kvpress.SnapKVPress(ratio(14), window_size=5, kernel_size=1), tiny_model(family, kv_heads=4)
    assert_same_entries(model, press, make_policy(name, budget=14, window=5, period=1, **options))
    with pytest.raises(AssertionError, match="layer 0"):  # control: another window
        assert_same_entries(model, press, make_policy("morphkv", budget=14, window=2, period=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_h2o_mass_is_observed_attention_times_its_observers(kvpress: Any, family: str) -> None:
    """The press takes the mean over a token's observers, H2O the sum."""
    model = tiny_model(family)
    scores: list[torch.Tensor] = []

    class Spy(kvpress.ObservedAttentionPress):
        def compress(self, *args: Any) -> Any:
            scores.append(self.score(*args))
            return args[2], args[3]

    keys_kept_by(model, Spy(0.5))
    cache = our_cache(model, make_policy("h2o", budget=PROMPT + 1))
    observers = torch.arange(PROMPT, 0, -1)
    for index, layer in cache.layers.items():
        group = 2  # query heads per kv head: the press averages over them, H2O here sums
        expected = scores[index] * observers * group
        torch.testing.assert_close(layer.state["mass"][:, :, :PROMPT], expected, atol=1e-4, rtol=1e-4)
        assert (layer.state["mass"] - scores[index] * group).abs().max() > 1  # control: the mass is not the mean
