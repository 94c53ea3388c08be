"""Cartridges, a benchmark: gradients reach the kept entries of a context, and training improves their approximation."""

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
        begun = studied.compacted(config) if start == "am" else cartridges.beginning(studied.whole, KEPT, FIRST, LAST)
        return engine.model, begun, rows, cartridges.logprobs(engine.model, studied.whole, rows)

    return make


@pytest.mark.parametrize("start", ["first", "am"])
def test_gradients_equal_finite_differences(start: str, trial: Callable, cartridges: ModuleType) -> None:
    model, begun, texts, full = trial(start)
    prefix = cartridges.Prefix(begun, FIRST + LAST)
    assert len(prefix.parameters()) == len(begun.layers) * (3 if start == "am" else 2)

    def loss() -> torch.Tensor:
        return cartridges.divergence(full, cartridges.logprobs(model, prefix.context(), texts))

    loss().backward()
    generator, by = torch.Generator().manual_seed(0), 1e-2
    for entries in prefix.parameters():
        assert bool((entries.grad.flatten(2).abs().amax(-1) > 0).all())
        along = torch.randn(entries.shape, generator=generator, dtype=entries.dtype)
        with torch.no_grad():
            entries.add_(along, alpha=by)
            above = loss()
            entries.sub_(along, alpha=2 * by)
            below = loss()
            entries.add_(along, alpha=by)
        assert float((above - below) / (2 * by)) == pytest.approx(float((entries.grad * along).sum()), rel=1e-2)


@pytest.mark.parametrize("start", ["first", "am"])
def test_training_lowers_the_divergence(start: str, trial: Callable, cartridges: ModuleType) -> None:
    model, begun, texts, full = trial(start)
    prefix, losses = cartridges.Prefix(begun, FIRST + LAST), []
    for _ in cartridges.train(model, prefix, texts, full, 0.03, (0, 5, 30), batch=4):
        with torch.no_grad():
            losses.append(float(cartridges.divergence(full, cartridges.logprobs(model, prefix.context(), texts))))
    assert losses[0] > losses[1] > losses[2] and losses[0] > 2 * losses[2], losses
    for before, after in zip(begun.layers, prefix.context().layers, strict=True):
        for x, y in zip(cartridges.parts(before), cartridges.parts(after), strict=True):
            assert torch.equal(x[:, :, : FIRST + LAST], y[:, :, : FIRST + LAST])
        assert begun.fitted or not bool(after.bias.any())


def test_the_first_entries_belong_to_the_first_tokens(trial: Callable) -> None:
    _, begun, *_ = trial("first")
    for layer in begun.layers:
        assert layer.positions.unique(dim=1).tolist() == [[[0, 38, 39, 1, 2, 3, 4, 5, 6]]]


def test_the_training_target_is_the_full_context(trial: Callable, cartridges: ModuleType) -> None:
    model, begun, texts, full = trial("first")
    with torch.no_grad():
        ids = torch.cat([torch.tensor(begun.tokens).expand(len(texts), -1), texts], dim=1)
        plain = model(input_ids=ids, use_cache=False).logits[:, len(begun.tokens) :].log_softmax(-1)
        own = cartridges.logprobs(model, begun, texts)
    torch.testing.assert_close(full, plain, rtol=0, atol=1e-5)
    wanted = torch.nn.functional.kl_div(own, full, log_target=True, reduction="sum") / texts.numel()
    torch.testing.assert_close(cartridges.divergence(full, own), wanted)
