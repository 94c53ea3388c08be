"""A run that learns nothing says so: from its rewards while it runs, and from its weights at its end."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_finite import recipe_of
from trainer_runs import digits, trained

from sparse_rl.commands.train import train
from sparse_rl.metrics import UNCHANGED, read_metrics
from trainer.base import bit_sums

NONE = lambda completions, **_: [None] * len(completions)  # noqa: E731
EQUAL = lambda completions, **_: [1.0] * len(completions)  # noqa: E731


@pytest.mark.parametrize(
    ("reward", "settings", "lines"),
    [
        (NONE, {"max_steps": 2}, ["step 1: nothing can be learnt from this batch: no completion has a reward"]),
        (EQUAL, {"max_steps": 9}, []),
        (
            EQUAL,
            {"max_steps": 12},
            ["step 10: nothing can be learnt from 10 batches in a row: the rewards within each"],
        ),
        (digits, {"max_steps": 2}, []),
    ],
    ids=["none", "equal, too few", "equal", "control"],
)
@pytest.mark.few(2)
def test_rewards_that_teach_nothing_give_one_line(grpo, caplog, reward, settings, lines):
    trainer = grpo(reward=reward, max_completion_length=6, zero_truncated_advantages=False, **settings)
    with caplog.at_level(logging.WARNING, "sparse_rl"):
        trained(trainer)
    messages = [record.getMessage() for record in caplog.records if record.name == "sparse_rl"]
    assert [message.startswith(line) for message, line in zip(messages, lines, strict=True)] == [True] * len(lines)
    assert (UNCHANGED in read_metrics(trainer.args.output_dir)[-1]) is (reward is not digits)


@pytest.mark.parametrize("zeroed", [True, False])
@pytest.mark.few(1)
def test_completions_that_are_all_cut_off_give_one_line(grpo, caplog, zeroed):
    trainer = grpo(max_completion_length=6, zero_truncated_advantages=zeroed)
    trainer.sampling, trainer.eos_token_id = replace(trainer.sampling, stop_token_ids=[]), -1
    with caplog.at_level(logging.WARNING, "sparse_rl"):
        assert [line["completions/clipped_ratio"] for line in trained(trainer)] == [1.0, 1.0]
    messages = [record.getMessage() for record in caplog.records if record.name == "sparse_rl"]
    assert len(messages) == zeroed
    if zeroed:
        assert messages[0].startswith("step 1: nothing can be learnt from this batch: every completion was cut off")
        assert messages[0].endswith("raise max_completion_length, or set zero_truncated_advantages: false")
    assert (UNCHANGED in read_metrics(trainer.args.output_dir)[-1]) is zeroed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo", "distill", "kvpop"])
def test_the_last_log_tells_if_the_weights_did_not_change(tiny, tmp_path, kind):
    def last(name: str, resume: str | None = None, **keys: Any) -> dict[str, Any]:
        train(recipe_of(kind, tmp_path / name, tiny("qwen3"), max_steps=1, **keys), resume)
        return read_metrics(tmp_path / name)[-1]

    assert last("still", learning_rate=1e-30)[UNCHANGED] == 1
    assert UNCHANGED not in last("moving", learning_rate=1e-3)
    assert UNCHANGED not in last("moving", "newest", learning_rate=1e-3)
    assert last("still", "newest", learning_rate=1e-30)[UNCHANGED] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_sums_of_weights_see_the_smallest_change(dtype):
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (3,), (4, 5), (2, 3, 4)):
        weight = torch.randn(shape, generator=generator).to(dtype)
        before = bit_sums([("w", weight), ("other", weight.clone())])
        assert bit_sums([("w", weight.clone()), ("other", weight)]) == before
        changed = weight.clone()
        changed.view(torch.uint8 if dtype.itemsize == 1 else getattr(torch, f"int{8 * dtype.itemsize}")).view(-1)[
            -1
        ] ^= 1
        assert bit_sums([("w", changed), ("other", weight)]) != before
