"""Cartridges, a benchmark, trains the keys, values and biases of a few kept entries (a prefix), so that the model's
outputs after the prefix approximate its outputs after the whole context of 40 tokens. Gradients reach all trained
entries, and training lowers the divergence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rollout import make_engine
from rollout.context import Context, PromptCacheConfig

FIRST, LAST, KEPT = 1, 2, 6


@pytest.fixture
def cartridges(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    return importlib.import_module("benchmarks.cartridges")


@pytest.fixture
def trial(new_model: Callable, prompts_of: Callable, cartridges: ModuleType) -> Callable:
    """trial(start) -> the model, the start of a prefix, texts [8, 12], and their outputs after the whole context."""

    def make(start: str) -> tuple[torch.nn.Module, Context, torch.Tensor, torch.Tensor]:
        engine = make_engine("hf", model=new_model("qwen3").double(), policy="full")
        engine.model.requires_grad_(False)
        tokens, *texts = prompts_of("qwen3", [40, *[12] * 8])
        config = PromptCacheConfig(ratio=KEPT / 37, first=FIRST, last=LAST)
        studied, rows = engine.study(tokens, config), torch.tensor(texts)
        prefix_start = (
            studied.compacted(config) if start == "am" else cartridges.beginning(studied.whole, KEPT, FIRST, LAST)
        )
        return engine.model, prefix_start, rows, cartridges.logprobs(engine.model, studied.whole, rows)

    return make


@pytest.mark.parametrize("start", ["first", "am"])
def test_gradients_equal_finite_differences(start: str, trial: Callable, cartridges: ModuleType) -> None:
    """For each trained tensor, the gradient of the divergence is not 0 at any entry, and its slope along a random
    direction equals the finite difference.
    """
    model, prefix_start, texts, full = trial(start)
    prefix = cartridges.Prefix(prefix_start, FIRST + LAST)
    assert len(prefix.parameters()) == len(prefix_start.layers) * (3 if start == "am" else 2)

    def loss() -> torch.Tensor:
        return cartridges.divergence(full, cartridges.logprobs(model, prefix.context(), texts))

    loss().backward()
    generator, step = torch.Generator().manual_seed(0), 1e-2
    for entries in prefix.parameters():
        assert bool((entries.grad.flatten(2).abs().amax(-1) > 0).all())
        direction = torch.randn(entries.shape, generator=generator, dtype=entries.dtype)
        with torch.no_grad():
            entries.add_(direction, alpha=step)
            above = loss()
            entries.sub_(direction, alpha=2 * step)
            below = loss()
            entries.add_(direction, alpha=step)
        assert float((above - below) / (2 * step)) == pytest.approx(float((entries.grad * direction).sum()), rel=1e-2)


@pytest.mark.parametrize("start", ["first", "am"])
def test_training_lowers_the_divergence_and_keeps_the_protected_entries(
    start: str, trial: Callable, cartridges: ModuleType
) -> None:
    """After 5 and 30 steps the divergence from the whole context's outputs is lower than at the start. The entries of
    the first and last tokens do not change, and a start without biases gets none.
    """
    model, prefix_start, texts, full = trial(start)
    prefix, losses = cartridges.Prefix(prefix_start, FIRST + LAST), []
    for _ in cartridges.train(model, prefix, texts, full, 0.03, (0, 5, 30), batch=4):
        with torch.no_grad():
            losses.append(float(cartridges.divergence(full, cartridges.logprobs(model, prefix.context(), texts))))
    assert losses[0] > losses[1] > losses[2], losses
    assert losses[0] > 2 * losses[2], losses
    for before, after in zip(prefix_start.layers, prefix.context().layers, strict=True):
        for x, y in zip(cartridges.parts(before), cartridges.parts(after), strict=True):
            assert torch.equal(x[:, :, : FIRST + LAST], y[:, :, : FIRST + LAST])
        assert prefix_start.fitted or not bool(after.bias.any())


def test_a_prefix_starts_with_the_entries_of_the_first_tokens(trial: Callable) -> None:
    """Under "first", the prefix holds the protected tokens (the first and the last two), then the tokens 1 to 6."""
    _, prefix_start, *_ = trial("first")
    for layer in prefix_start.layers:
        assert layer.positions.unique(dim=1).tolist() == [[[0, 38, 39, 1, 2, 3, 4, 5, 6]]]


def test_the_training_target_is_the_output_after_the_full_context(trial: Callable, cartridges: ModuleType) -> None:
    """The target equals the log-probs of one plain forward pass over context and text; the divergence is the
    Kullback-Leibler divergence per token.
    """
    model, prefix_start, texts, full = trial("first")
    with torch.no_grad():
        ids = torch.cat([torch.tensor(prefix_start.tokens).expand(len(texts), -1), texts], dim=1)
        plain = model(input_ids=ids, use_cache=False).logits[:, len(prefix_start.tokens) :].log_softmax(-1)
        after_prefix = cartridges.logprobs(model, prefix_start, texts)
    torch.testing.assert_close(full, plain, rtol=0, atol=1e-5)
    expected = torch.nn.functional.kl_div(after_prefix, full, log_target=True, reduction="sum") / texts.numel()
    torch.testing.assert_close(cartridges.divergence(full, after_prefix), expected)
