"""Cartridges as a policy of one-shot compaction: entries that gradient descent trains on self-study."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from continued import check_continuation, stories
from tiny import new_model, prompts_of

from rollout import SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig
from rollout.context.cartridge import Cartridge, beginning, divergence, logprobs
from rollout.context.config import CartridgeConfig
from rollout.context.reader import ContextPrompts, Conversation, Reader
from sparse_rl.errors import UserError

TOKENS = 60


SIZES = {"ratio": 0.2, "first": 2, "last": 3, "study_samples": 64, "study_tokens": 16}
CONFIG = PromptCacheConfig(policy="cartridge", cartridge=CartridgeConfig(steps=80, batch=8, rate=0.02), **SIZES)


@pytest.mark.slow
def test_training_brings_a_cartridge_closer_to_the_full_cache() -> None:
    """KL(full cache || cartridge) on other answers halves in 80 steps. Fixed entries stay, and continuations have the
    log-probs of a slow reference."""
    engine, tokens, question = stories(5)
    prompts = ContextPrompts(requests=[question])
    studied = engine.study(tokens, CONFIG, prompts)
    context = studied.compacted(CONFIG)
    start = beginning(studied.whole, 11, 2, 3)
    assert context.entries == start.entries == 16
    assert context.fitted
    assert {"prefill", "self-study", "training"} <= context.seconds.keys()
    for trained, old, whole in zip(context.layers, start.layers, studied.whole.layers, strict=True):
        assert torch.equal(trained.positions, old.positions)
        assert torch.equal(trained.keys[:, :, :5], whole.keys[:, :, [0, 1, 57, 58, 59]])
        assert torch.equal(old.keys[:, :, 5:], whole.keys[:, :, 2:13])
        assert not bool((trained.keys[:, :, 5:] == old.keys[:, :, 5:]).any())
        assert not bool(trained.bias.any())
    answers = engine.generate([question], SamplingConfig(12, n=8, seed=9), studied.whole)
    texts = [Conversation(question, r.completion_ids) for r in answers]
    reader = Reader(engine, prompts)
    with torch.no_grad():
        full = logprobs(reader, studied.whole, texts)
        before, after = (float(divergence(full, logprobs(reader, kept, texts))) for kept in (start, context))
    assert after < before / 2
    check_continuation(engine, context, question)


@pytest.mark.parametrize("start", ["first", "am"])
def test_gradients_equal_finite_differences(start: str) -> None:
    """In float64, for each trained tensor, with no gradient of 0. Biases are trained if the start has fitted ones."""
    engine = make_engine("hf", model=new_model("qwen3").double(), policy="full")
    tokens, *answers = prompts_of("qwen3", [40, 12, 12, 9])
    reader, config = Reader(engine, ContextPrompts()), PromptCacheConfig(ratio=6 / 37, first=1, last=2)
    studied = engine.study(tokens, config)
    begun = studied.compacted(config) if start == "am" else beginning(studied.whole, 6, 1, 2)
    texts = [Conversation(answer[:3], answer[3:]) for answer in answers]
    full = logprobs(reader, studied.whole, texts).detach()
    cartridge = Cartridge(begun, 3)
    assert len(cartridge.parameters()) == len(begun.layers) * (3 if start == "am" else 2)

    def loss() -> torch.Tensor:
        own = logprobs(reader, cartridge.context(), texts)
        return divergence(full, own)

    generator, step = torch.Generator().manual_seed(0), 1e-2
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), cartridge.parameters())
    for entries, gradient in zip(cartridge.parameters(), gradients, strict=True):
        assert bool((gradient.flatten(2).abs().amax(-1) > 0).all())
        direction = torch.randn(entries.shape, generator=generator, dtype=entries.dtype)
        with torch.no_grad():
            entries.add_(direction, alpha=step)
            above = loss()
            entries.sub_(direction, alpha=2 * step)
            below = loss()
            entries.add_(direction, alpha=step)
        assert float((above - below) / (2 * step)) == pytest.approx(float((gradient * direction).sum()), rel=1e-2)
    for before, after in zip(begun.layers, cartridge.context().layers, strict=True):
        assert torch.equal(before.keys[:, :, :3], after.keys[:, :, :3])
        assert start == "am" or not bool(after.bias.any())


def test_the_training_target_is_the_output_after_the_full_context() -> None:
    """The target equals plain passes over context, starter and answer; the loss is the KL divergence per token."""
    engine, tokens, question = stories(5)
    texts = [Conversation(question, tokens[5:12]), Conversation(question[:2], tokens[9:13])]
    reader, whole = Reader(engine, ContextPrompts()), engine.compact(tokens, PromptCacheConfig(policy="full"))
    with torch.no_grad():
        full = logprobs(reader, whole, texts)
        own = logprobs(reader, beginning(whole, 6, 2, 3), texts)
        plain = []
        for text in texts:
            logits = engine.model(input_ids=torch.tensor([[*tokens, *text.tokens]]), use_cache=False).logits[0]
            plain.append(logits[-len(text.answer) - 1 : -1].log_softmax(-1))
    torch.testing.assert_close(full, torch.cat(plain), rtol=0, atol=1e-4)
    expected = torch.nn.functional.kl_div(own, full, log_target=True, reduction="sum") / (7 + 4)
    torch.testing.assert_close(divergence(full, own), expected)


def test_a_cartridge_is_trained_for_the_weights_alone_that_it_has() -> None:
    """The model's weights and gradients stay as they are, and training is repeatable."""
    engine, tokens, question = stories(5)
    before = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    config = replace(CONFIG, cartridge=CartridgeConfig(steps=3, batch=3))
    contexts: list[Context] = [engine.compact(tokens, config, ContextPrompts(requests=[question])) for _ in range(2)]
    assert torch.equal(contexts[0].layers[4].values, contexts[1].layers[4].values)
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


def test_a_cartridge_needs_self_study() -> None:
    engine, tokens, _ = stories(5)
    with pytest.raises(UserError, match="self_study needs prompts that ask about the context"):
        engine.compact(tokens, CONFIG)
