"""Cartridges as a policy of one-shot compaction: entries that gradient descent trains on self-study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from continued import slow_logprobs
from judging import gap

from rollout import SamplingConfig, make_engine
from rollout.context import Context, PromptCacheConfig
from rollout.context.cartridge import Cartridge, beginning, divergence, logprobs
from rollout.context.config import CartridgeConfig
from rollout.context.conversations import Conversation
from rollout.context.prompts import ContextPrompts
from rollout.context.reader import EngineReader
from sparse_rl.errors import UserError

TOKENS = 60


@pytest.fixture
def stories(model_of: Callable, prompts_of: Callable) -> tuple:
    """An hf engine of the story model, a context of 60 tokens, and a prompt of 5 tokens."""
    engine = make_engine("hf", model=model_of("stories260K"), policy="full")
    return engine, *prompts_of("stories260K", [TOKENS, 5])


CONFIG = PromptCacheConfig(
    policy="cartridge", ratio=0.2, first=2, last=3, study_samples=64, study_tokens=16,
    cartridge=CartridgeConfig(steps=80, batch=8, rate=0.02),
)  # fmt: skip


@pytest.mark.slow
def test_training_brings_a_cartridge_closer_to_the_full_cache(stories: tuple, model_of: Callable) -> None:
    """After 80 steps, KL(full cache || cartridge) on other answers is below half of that of the start, which has the
    first 11 of the tokens that compete. The first 2 and the last 3 entries stay. Continuations have the log-probs of a
    slow reference over the entries, up to 1e-5.
    """
    engine, tokens, question = stories
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
    reader = EngineReader(engine, prompts)
    with torch.no_grad():
        full = logprobs(reader, studied.whole, texts)
        before, after = (float(divergence(full, logprobs(reader, kept, texts))) for kept in (start, context))
    assert after < before / 2
    (r,) = engine.generate([question], SamplingConfig(12, seed=1, ignore_eos=True), context)
    assert gap([slow_logprobs(model_of("stories260K"), context, question, r.completion_ids)], [r]) <= 1e-5


@pytest.mark.parametrize("start", ["first", "am"])
def test_gradients_equal_finite_differences(start: str, new_model: Callable, prompts_of: Callable) -> None:
    """In float64, for each trained tensor, the gradient of the loss is not 0 at any entry, and its slope along a random
    direction equals the finite difference. Biases are trained if the start has fitted ones. The fixed entries stay.
    """
    engine = make_engine("hf", model=new_model("qwen3").double(), policy="full")
    tokens, *answers = prompts_of("qwen3", [40, 12, 12, 9])
    reader, config = EngineReader(engine, ContextPrompts()), PromptCacheConfig(ratio=6 / 37, first=1, last=2)
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


def test_the_training_target_is_the_output_after_the_full_context(stories: tuple) -> None:
    """The target equals the log-probs of plain forward passes over context, starter and answer, at the tokens that
    precede an answer's tokens. The loss is the Kullback-Leibler divergence per token.
    """
    engine, tokens, question = stories
    texts = [Conversation(question, tokens[5:12]), Conversation(question[:2], tokens[9:13])]
    reader, whole = EngineReader(engine, ContextPrompts()), engine.compact(tokens, PromptCacheConfig(policy="full"))
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


def test_a_cartridge_is_trained_for_the_weights_alone_that_it_has(stories: tuple) -> None:
    """Training leaves the model's weights and their gradients as they are, and is repeatable."""
    engine, tokens, question = stories
    before = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    config = replace(CONFIG, cartridge=CartridgeConfig(steps=3, batch=3))
    contexts: list[Context] = [engine.compact(tokens, config, ContextPrompts(requests=[question])) for _ in range(2)]
    assert torch.equal(contexts[0].layers[4].values, contexts[1].layers[4].values)
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


def test_a_cartridge_needs_self_study(stories: tuple) -> None:
    engine, tokens, _ = stories
    with pytest.raises(UserError, match="self_study needs prompts that ask about the context"):
        engine.compact(tokens, CONFIG)
