"""The check that stands before FlexAttention is used: it passes what is exact, and stops what is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_rl import engines
from sparse_rl.attention import flex
from sparse_rl.attention.parity import Parity, check_parity, random_evictions
from sparse_rl.commands import doctor
from sparse_rl.engines import choose_attention, settle_attention
from sparse_rl.errors import UserError
from sparse_rl.recipe import load_recipe

SHAPES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "length": 256}
CONFIG = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, head_dim=16)


@pytest.fixture
def plain(flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients on a CPU; and several segments in 256 tokens."""
    monkeypatch.setattr(flex, "segment_of", lambda _: 128)


def recipe_with(attention: str) -> Any:
    return load_recipe("quickstart/grpo", [f"attention={attention}"])


@pytest.mark.parametrize("path", ["flex", "flex_sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_exact_passes(path: str, dtype: torch.dtype, plain: None) -> None:
    found = check_parity(path, "cpu", dtype, **SHAPES)
    assert found.failure is None
    assert set(found.errors) == {"out", "dq", "dk", "dv", "lse"}
    assert all(0 <= error <= allowed for error, allowed in found.errors.values())
    assert str(found).startswith(f"{path} is exact here (error / allowed: out ")


def wrong_dq(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """As Hopper's: the forward is right, and 2 % of the gradient of q is not."""
    return out + 0.02 * (q - q.detach()), lse


def wrong_out(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out * 1.02, lse


def wrong_lse(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out, None if lse is None else lse + 0.01


def nan(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out * torch.where(torch.arange(out.shape[2])[:, None] == 9, torch.nan, 1.0), lse


def in_padding(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The second row ends in padding."""
    last = torch.zeros(2, 1, out.shape[2], 1, dtype=torch.bool)
    last[1, :, -1] = True
    return torch.where(last, 1.0, out), lse


class NaNBehind(torch.autograd.Function):
    """A gradient that is NaN in padding only: multiplied by anything it would be NaN in the weights."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        grad[1, :, -1] = torch.nan
        return grad


def nan_in_the_gradient_of_padding(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out + 0 * NaNBehind.apply(q), lse


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        (wrong_dq, ["dq"]),
        (wrong_out, ["out", "dq"]),
        (wrong_lse, ["lse"]),
        (nan, ["out"]),
        (in_padding, ["out"]),
        (nan_in_the_gradient_of_padding, ["dq"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_wrong_does_not(
    fault: Callable, shows: list[str], dtype: torch.dtype, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = flex.flex_attend
    faulty = lambda evict_at, q, *args, **kwargs: fault(*attend(evict_at, q, *args, **kwargs), q)  # noqa: E731
    monkeypatch.setattr("sparse_rl.attention.replay.flex_attend", faulty)
    monkeypatch.setattr("sparse_rl.attention.parity.flex_attend", faulty)
    found = check_parity("flex_sorted", "cpu", dtype, **SHAPES)
    assert found.failure is not None and found.failure.startswith("it is not exact on this machine (error / allowed: ")
    assert all(f"{name} " in found.failure for name in shows)


def test_a_kernel_that_raises_is_not_used() -> None:
    """torch itself refuses to differentiate on a CPU: its word, in one line."""
    found = check_parity("flex", "cpu", torch.float32, **SHAPES)
    assert found.failure is not None
    assert found.failure.startswith("NotImplementedError: FlexAttention does not support backward on CPU.")
    assert "\n" not in str(found) and str(found).startswith("flex is not used: ")


def test_the_traces_of_the_check() -> None:
    """Ragged on both sides, each head with evictions of its own, some tokens never evicted."""
    evict_at = random_evictions(2, 3, 300, 40, torch.Generator().manual_seed(0))
    position = torch.arange(300)
    assert (evict_at[0] > position).all() and (evict_at[1, :, 50:250] > position[50:250]).all()
    assert not evict_at[1, :, 250:].any() and not evict_at[1, :, :50].any()
    lives = (evict_at[0] - position).clamp(max=300).float()
    assert 20 < lives.median() < 40  # 40 on average
    assert (evict_at >= 300).any() and not torch.equal(evict_at[0, 0], evict_at[0, 1])


def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """auto is sdpa, and says why; flex by name is one line about the key."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_attention(recipe_with("auto"), CONFIG) == (
        "sdpa", "sdpa (there is no GPU, and on a CPU FlexAttention has no backward)"
    )  # fmt: skip
    with caplog.at_level("INFO", logger="sparse_rl"):
        assert settle_attention(recipe_with("auto"), CONFIG).attention == "sdpa"
    assert "attention: sdpa (there is no GPU" in caplog.text
    for path in ("sdpa", "dense"):
        assert choose_attention(recipe_with(path), CONFIG) == (path, path)
    for path in ("flex", "flex_sorted"):
        with pytest.raises(UserError, match=r"^attention: there is no GPU, .* use sdpa$"):
            choose_attention(recipe_with(path), CONFIG)
    with pytest.raises(UserError, match="attention"):
        recipe_with("flash")


@pytest.mark.parametrize(
    ("exact", "asked", "chosen"),
    [
        ({"flex_sorted", "flex"}, "auto", "flex_sorted"),
        ({"flex"}, "auto", "flex"),
        (set(), "auto", "sdpa"),
        ({"flex"}, "flex", "flex"),
        ({"flex"}, "flex_sorted", None),
    ],
)
def test_on_a_gpu_only_what_is_exact(
    exact: set[str], asked: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best that passes; by name, it or an error. The checks themselves are those above."""
    done: list[str] = []

    def check(path: str, device: torch.device, dtype: torch.dtype, **shapes: int) -> Parity:
        done.append(path)
        assert device == torch.device("cuda", 0) and dtype == torch.float32
        assert shapes == {"heads": 4, "kv_heads": 2, "head_dim": 16}
        return Parity(path, failure=None if path in exact else "it is not exact on this machine")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")  # of one visible GPU each
    monkeypatch.setattr("sparse_rl.attention.parity.check_parity", check)
    recipe = recipe_with(asked)
    if chosen is None:
        with pytest.raises(UserError, match=r"^attention: flex_sorted is not used: .*; use sdpa$"):
            choose_attention(recipe, CONFIG)
        return
    path, finding = choose_attention(recipe, CONFIG)
    assert path == chosen and finding.endswith(
        f"{chosen} is exact here (error / allowed: )" if chosen != "sdpa" else "sdpa"
    )
    wanted = {"flex_sorted": ["flex_sorted"], "flex": ["flex_sorted", "flex"], "sdpa": ["flex_sorted", "flex"]}
    assert done == (wanted[chosen] if asked == "auto" else [asked])


def test_a_teacher_of_packed_rows_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable
) -> None:
    """At its own shapes; a path must be exact at both."""
    new_model("qwen3", num_attention_heads=8).save_pretrained(tmp_path)
    seen: list[tuple[str, int]] = []

    def check(path: str, *_: Any, heads: int, **__: Any) -> Parity:
        seen.append((path, heads))
        return Parity(path, failure="no" if (path, heads) == ("flex_sorted", 8) else None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sparse_rl.attention.parity.check_parity", check)
    keys = [f"teacher={tmp_path}", "packing=true"]
    assert choose_attention(load_recipe("quickstart/distill", keys), CONFIG)[0] == "flex"
    assert seen == [("flex_sorted", 4), ("flex_sorted", 8), ("flex", 4), ("flex", 8)]
    seen.clear()
    assert choose_attention(load_recipe("quickstart/distill", [keys[0], "packing=false"]), CONFIG)[0] == "flex_sorted"
    assert seen == [("flex_sorted", 4)]


def test_doctor_shows_both(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable) -> None:
    """With a recipe: natural and sorted where there is a GPU, else what is used."""
    from sparse_rl.models.load import load_config

    new_model("qwen3").save_pretrained(tmp_path)
    recipe = load_recipe("quickstart/grpo", [f"model={tmp_path}"])
    config = load_config(str(tmp_path))
    if not torch.cuda.is_available():
        assert any(line.startswith("attention: sdpa (there is no GPU") for line in doctor.fit(recipe, config)[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "attention_checks", lambda *_: [Parity("flex_sorted"), Parity("flex", failure="no")])
    monkeypatch.setattr("sparse_rl.commands.memory.device_memory", lambda: None)
    shown = [line for line in doctor.fit(recipe, config)[1] if line.startswith("attention: ")]
    assert shown == ["attention: flex_sorted is exact here (error / allowed: )", "attention: flex is not used: no"]
