"""The policy `press` equals kvpress's own generation token for token, and its rollouts are replayed exactly.

kvpress 0.5 reads `cache_position`, which transformers no longer hands to the attention layers; so the reference runs
kvpress's forward hook with `cache_position` added. The prompts have no repeated token, because equal tokens have
equal keys before rotation, and torch.topk then chooses among equal scores as it likes; ours keeps the earlier entry.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from judging import trainer_gap, wrong_traces
from tiny import new_model
from transformers import DynamicCache

from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.errors import UserError
from sparse_rl.methods.press.policy import kvpress_module
from sparse_rl.policies import make_policy
from sparse_rl.trace import NEVER

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
TOKENS, VOCABULARY = 16, 97
PROMPTS = [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(n))[:n].tolist() for n in (33, 40, 57)]
PRESSES: dict[str, dict[str, Any]] = {
    "SnapKVPress": {"window_size": 8},
    "KnormPress": {},
    "TOVAPress": {},
    "ExpectedAttentionPress": {"n_future_positions": 16},
    "KeyDiffPress": {},
    "StreamingLLMPress": {"n_sink": 2},
    "LeverageScorePress": {},
    "CapPress": {"n_future_positions": 16, "n_sink": 2},
}


@pytest.fixture(autouse=True)
def _known(request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
    if name == "CapPress" and not hasattr(kvpress_module(), name):
        pytest.skip("kvpress before 0.5.4 has no CapPress")


def tiny_model(family: str = "llama") -> Any:
    # attention that is not flat, and matters
    model = new_model(family, vocab_size=VOCABULARY, eos_token_id=None, initializer_range=0.25)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "k_norm" in name:  # otherwise all keys of Qwen3 have one norm, by which KnormPress scores them
                weight.uniform_(0.5, 1.5)
    return model


def kvpress_tokens(model: Any, press: Any, prompt: list[int]) -> list[int]:
    """Return the greedy completion of a prompt that kvpress compresses: 16 token ids."""
    cache, tokens = DynamicCache(), []

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        return press.forward_hook(module, args, {**kwargs, "cache_position": torch.arange(len(prompt))}, output)

    press.post_init_from_model(model)
    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]
        for handle in hooks:
            handle.remove()
        for step in range(TOKENS):
            tokens.append(int(logits.argmax()))
            position = torch.tensor([[len(prompt) + step]])
            given = torch.tensor([[tokens[-1]]])
            logits = model(given, past_key_values=cache, position_ids=position).logits[0, -1]
    assert cache.layers[0].keys.shape[2] < len(prompt) + TOKENS
    return tokens


def sampled(model: Any, name: str, ratio: float = 0.5, prompts: list[list[int]] = PROMPTS) -> list[Rollout]:
    policy = make_policy("press", press=name, compression_ratio=ratio, options=PRESSES[name])
    engine = make_engine("hf", model=model, policy=policy)
    return engine.generate(prompts, SamplingConfig(TOKENS, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.few(7)
def test_a_press_gives_the_tokens_of_kvpress(name: str, family: str) -> None:
    rollouts = sampled(tiny_model(family), name)
    press = getattr(kvpress_module(), name)(compression_ratio=0.5, **PRESSES[name])
    expected = [kvpress_tokens(tiny_model(family), press, prompt) for prompt in PROMPTS]
    assert [rollout.completion_ids for rollout in rollouts] == expected
    full = make_engine("hf", model=tiny_model(family), policy="full")
    greedy = full.generate(PROMPTS, SamplingConfig(TOKENS, temperature=0.0, ignore_eos=True))
    assert [rollout.completion_ids for rollout in greedy] != expected  # control: the press changes the completions


@pytest.mark.parametrize("name", PRESSES)
def test_rollouts_under_a_press_are_replayed_exactly(name: str) -> None:
    model = tiny_model()
    rollouts = sampled(model, name)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        evicted = rollout.trace.evict_at < NEVER
        assert evicted.sum(-1).eq(len(prompt) - len(prompt) // 2).all()
        assert set(rollout.trace.evict_at[evicted].tolist()) == {len(prompt)}

    assert trainer_gap(model, rollouts) <= 1e-5
    wrong = wrong_traces(rollouts)
    # TOVAPress and StreamingLLMPress evict the same entries from all heads
    assert ("heads swapped" in wrong) is (name not in ("TOVAPress", "StreamingLLMPress"))
    for change, altered in wrong.items():
        assert trainer_gap(model, altered) > 1e-4, change


def test_a_prompt_gives_the_same_rollout_alone_and_in_a_batch() -> None:
    together = sampled(tiny_model(), "SnapKVPress")
    alone = [sampled(tiny_model(), "SnapKVPress", prompts=[prompt])[0] for prompt in PROMPTS]
    assert [r.completion_ids for r in alone] == [r.completion_ids for r in together]
    assert all(torch.equal(a.trace.evict_at, b.trace.evict_at) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.9, 0.999])
def test_the_number_of_kept_entries_is_that_of_kvpress(ratio: float) -> None:
    for prompt, rollout in zip(PROMPTS, sampled(tiny_model(), "KnormPress", ratio), strict=True):
        kept = (rollout.trace.evict_at[..., : len(prompt)] == NEVER).sum(-1)
        assert kept.eq(max(1, int(len(prompt) * (1 - ratio)))).all()  # we keep at least one entry


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"press": "SnapKVPres"}, "cache.press: kvpress has no 'SnapKVPres' .did you mean 'SnapKVPress'"),
        ({"press": "ScorerPres_"}, "cache.press: kvpress has no"),
        ({"press": "AdaKVPress"}, "cache.press: AdaKVPress: only presses that evict the entries with the lowest"),
        ({"press": "PyramidKVPress"}, "only presses that evict the entries with the lowest scores"),
        ({"press": "ObservedAttentionPress"}, "needs the weights of attention"),
        ({"press": "ScorerPress"}, "only presses that evict the entries with the lowest scores"),
        (
            {"press": "SnapKVPress", "options": {"window": 8}},
            "cache.options: SnapKVPress.*unexpected keyword argument 'window'",
        ),
        *(({"press": "SnapKVPress", "compression_ratio": ratio}, "_ratio: .* between 0 and 1") for ratio in (0, 1.0)),
    ],
)
def test_a_wrong_press_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_policy("press", **settings)
    assert "\n" not in str(caught.value)


def test_a_prompt_that_a_press_refuses_is_one_line() -> None:
    engine = make_engine("hf", model=tiny_model(), policy=make_policy("press", options={"window_size": 50}))
    with pytest.raises(UserError, match=r"SnapKVPress cannot score a prompt of 40 tokens: .*window size 50") as caught:
        engine.generate([PROMPTS[1]], SamplingConfig(TOKENS))
    assert "\n" not in str(caught.value)
