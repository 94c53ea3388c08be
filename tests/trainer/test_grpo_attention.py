"""A GRPO step has the same loss and gradient with every attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import TrainerCallback


class Gradients(TrainerCallback):
    """Records the gradient of each parameter before the optimizer's step."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.of = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "checkpointing", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="checkpointed")]
)
def test_a_step_does_not_depend_on_the_attention_kernel(
    checkpointing: bool, flex_trains: list[bool], grpo: Callable
) -> None:
    """With every attention kernel, a step has the same loss, log-probs and gradients within 1e-5, for rows padded on
    both sides. Control: the gradients of full attention differ by more than 1e-2."""
    results = {}
    for name in ("sdpa", "gather", "flex", "flex_sorted", "dense", "full"):
        gradients = Gradients()
        options: dict[str, Any] = {"train_attention": "full"} if name == "full" else {"attention_kernel": name}
        trainer = grpo(
            name,
            max_steps=1,
            max_grad_norm=1e9,
            gradient_checkpointing=checkpointing,
            callbacks=(gradients,),
            **options,
        )
        flex_trains.clear()
        trainer.train()
        results[name] = trainer.state.log_history[0], gradients.of
        assert set(flex_trains) == {"flex": {False}, "flex_sorted": {True}}.get(name, set())

    def distance(name: str) -> float:
        pairs = [(results[name][1][key], gradient) for key, gradient in results["sdpa"][1].items()]
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)

    for name in ("gather", "flex", "flex_sorted", "dense"):
        for key in ("loss", "replay/gap_max", "entropy", "grad_norm"):
            assert results[name][0][key] == pytest.approx(results["sdpa"][0][key], abs=1e-5), key
        assert distance(name) <= 1e-5
    assert distance("full") > 1e-2


def test_an_unknown_kernel_is_refused(grpo: Callable) -> None:
    with pytest.raises(ValueError, match=r"^attention_kernel: must be one of \('gather', .*\), got 'flash'$"):
        grpo(attention_kernel="flash")
