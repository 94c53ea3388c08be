"""Before FlexAttention is used, `check_parity` compares it with the dense reference on this machine. The check passes
exact kernels and refuses all others, and `doctor` reports its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import new_model

from sparse_rl.attention import startup as choice
from sparse_rl.attention.startup import choose_kernel
from sparse_rl.commands import doctor
from sparse_rl.errors import UserError
from sparse_rl.kernels import flex
from sparse_rl.kernels.parity import Parity, check_parity, random_evictions
from sparse_rl.models.load import load_config
from sparse_rl.recipe import load_recipe

SHAPES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "length": 256}
CONFIG = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, head_dim=16)


@pytest.mark.parametrize("kernel", ["flex", "flex_sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_kernels_pass_the_check(kernel: str, dtype: torch.dtype, flex_trains: list[bool]) -> None:
    """The errors of output, gradients and log-sum-exp are reported, and each is within its allowed error."""
    parity = check_parity(kernel, "cpu", dtype, **SHAPES)
    assert parity.failure is None
    assert set(parity.errors) == {"out", "dq", "dk", "dv", "lse"}
    assert all(0 <= error <= allowed for error, allowed in parity.errors.values())
    assert str(parity).startswith(f"{kernel} is exact here (error / allowed: out ")


def wrong_dq(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A fault as on Hopper: the forward pass is right, and the gradient of q is wrong by 2 %."""
    return out + 0.02 * (q - q.detach()), lse


def in_padding(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A fault in the padding at the end of the second row."""
    last = torch.zeros(2, 1, out.shape[2], 1, dtype=torch.bool)
    last[1, :, -1] = True
    return torch.where(last, 1.0, out), lse


class NaNInPadding(torch.autograd.Function):
    """The identity, with a gradient that is NaN only in padding, where it would spoil the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        grad[1, :, -1] = torch.nan
        return grad


@pytest.mark.parametrize(
    ("fault", "visible_in"),
    [
        (wrong_dq, ["dq"]),
        (lambda out, lse, q: (out * 1.02, lse), ["out", "dq"]),
        (lambda out, lse, q: (out, None if lse is None else lse + 0.01), ["lse"]),
        (
            lambda out, lse, q: (out * torch.where(torch.arange(out.shape[2])[:, None] == 9, torch.nan, 1.0), lse),
            ["out"],
        ),
        (in_padding, ["out"]),
        (lambda out, lse, q: (out + 0 * NaNInPadding.apply(q), lse), ["dq"]),
    ],
    ids=["dq", "out", "lse", "nan", "padding", "nan in the gradient of padding"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.few(6)
def test_wrong_kernels_fail_the_check(
    fault: Callable, visible_in: list[str], dtype: torch.dtype, flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one-line failure names the quantities in which the fault shows."""
    attend = flex.flex_attend
    faulty = lambda evict_at, q, *args, **kwargs: fault(*attend(evict_at, q, *args, **kwargs), q)  # noqa: E731
    monkeypatch.setattr("sparse_rl.kernels.masked.flex_attend", faulty)
    monkeypatch.setattr("sparse_rl.kernels.parity.flex_attend", faulty)
    parity = check_parity("flex_sorted", "cpu", dtype, **SHAPES)
    assert parity.failure is not None
    assert parity.failure.startswith("it is not exact on this machine (error / allowed: ")
    assert all(f"{name} " in parity.failure for name in visible_in)


def test_a_kernel_that_raises_is_not_used() -> None:
    """On a CPU torch refuses to compute flex's gradients; its message is quoted in one line."""
    parity = check_parity("flex", "cpu", torch.float32, **SHAPES)
    assert parity.failure is not None
    assert parity.failure.startswith("NotImplementedError: FlexAttention does not support backward on CPU.")
    assert "\n" not in str(parity)
    assert str(parity).startswith("flex is not used: ")


def test_the_check_uses_padded_rows_and_evictions_that_differ_between_heads() -> None:
    """Row 1 has 50 columns of padding on each side. Tokens live for about 40 queries, some for ever."""
    evict_at = random_evictions(2, 3, 300, 40, torch.Generator().manual_seed(0))
    position = torch.arange(300)
    assert (evict_at[0] > position).all()
    assert (evict_at[1, :, 50:250] > position[50:250]).all()
    assert not evict_at[1, :, 250:].any()
    assert not evict_at[1, :, :50].any()
    lifetimes = (evict_at[0] - position).clamp(max=300).float()
    assert 20 < lifetimes.median() < 40
    assert (evict_at >= 300).any()
    assert not torch.equal(evict_at[0, 0], evict_at[0, 1])


def test_without_a_gpu_auto_chooses_gather_and_flex_is_refused() -> None:
    """gather, sdpa and dense are used if named; other names are an error of the key `attention_kernel`."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    reason = "gather (there is no GPU, and on a CPU FlexAttention has no backward)"
    assert choose_kernel("auto", [CONFIG], "float32") == ("gather", reason)
    for kernel in ("gather", "sdpa", "dense"):
        assert choose_kernel(kernel, [CONFIG], "float32") == (kernel, kernel)
    for kernel in ("flex", "flex_sorted"):
        with pytest.raises(UserError, match=r"^attention_kernel: there is no GPU, .* use gather$"):
            choose_kernel(kernel, [CONFIG], "float32")
    with pytest.raises(UserError, match="attention_kernel"):
        load_recipe("quickstart/grpo", ["attention_kernel=flash"])


@pytest.mark.parametrize(
    ("exact", "asked", "chosen"),
    [
        ({"flex_sorted", "flex"}, "auto", "flex_sorted"),
        ({"flex"}, "auto", "flex"),
        (set(), "auto", "gather"),
        ({"flex"}, "flex", "flex"),
        ({"flex"}, "flex_sorted", None),
    ],
)
def test_only_exact_kernels_are_chosen_on_a_gpu(
    exact: set[str], asked: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes the first of flex_sorted, flex, gather that passes. A named kernel that fails is an error."""
    checked: list[str] = []

    def check(kernel: str, device: torch.device, dtype: torch.dtype, **shapes: int) -> Parity:
        checked.append(kernel)
        assert device == torch.device("cuda", 0)
        assert dtype == torch.float32
        assert shapes == {"heads": 4, "kv_heads": 2, "head_dim": 16}
        return Parity(kernel, failure=None if kernel in exact else "it is not exact on this machine")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")  # one visible GPU per process
    monkeypatch.setattr("sparse_rl.attention.startup.check_parity", check)
    if chosen is None:
        with pytest.raises(UserError, match=r"^attention_kernel: flex_sorted is not used: .*; use gather$"):
            choose_kernel(asked, [CONFIG], "float32")
        return
    kernel, finding = choose_kernel(asked, [CONFIG], "float32")
    assert kernel == chosen
    assert finding.endswith(f"{chosen} is exact here (error / allowed: )" if chosen != "gather" else "gather")
    expected = {"flex_sorted": ["flex_sorted"], "flex": ["flex_sorted", "flex"], "gather": ["flex_sorted", "flex"]}
    assert checked == (expected[chosen] if asked == "auto" else [asked])


def test_large_heads_take_gather_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 512 would take more shared memory than a GPU has. Control: heads of 256 are checked."""
    checked: list[int] = []

    def check(kernel: str, *_: Any, head_dim: int, **__: Any) -> Parity:
        checked.append(head_dim)
        return Parity(kernel)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sparse_rl.attention.startup.check_parity", check)
    large, small = (SimpleNamespace(**{**vars(CONFIG), "head_dim": dim}) for dim in (512, 256))
    assert choose_kernel("auto", [large], "bfloat16")[0] == "gather"
    with pytest.raises(UserError, match=r"^attention_kernel: flex is not used: heads of 512 .* than 256; use gather$"):
        choose_kernel("flex", [large], "bfloat16")
    assert not checked
    assert choose_kernel("auto", [small], "bfloat16")[0] == "flex_sorted"
    assert checked == [256]


def test_with_packing_a_kernel_must_be_exact_for_student_and_teacher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """`auto` refuses one that fails for the teacher's 8 heads. Without packing only the student's 4 are checked."""
    new_model("qwen3", num_attention_heads=8).save_pretrained(tmp_path)
    new_model("qwen3", num_attention_heads=4).save_pretrained(tmp_path / "student")
    checked: list[tuple[str, int]] = []

    def check(kernel: str, *_: Any, heads: int, **__: Any) -> Parity:
        checked.append((kernel, heads))
        return Parity(kernel, failure="no" if (kernel, heads) == ("flex_sorted", 8) else None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sparse_rl.attention.startup.check_parity", check)

    def chosen(packing: str) -> str:
        keys = [f"model={tmp_path / 'student'}", f"teacher={tmp_path}", f"packing={packing}"]
        recipe = load_recipe("quickstart/distill", keys)
        return choose_kernel("auto", map(load_config, recipe.attending_models()), "float32")[0]

    assert chosen("true") == "flex"
    assert checked == [("flex_sorted", 4), ("flex_sorted", 8), ("flex", 4), ("flex", 8)]
    checked.clear()
    assert chosen("false") == "flex_sorted"
    assert checked == [("flex_sorted", 4)]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Write a tiny model to tmp_path, and return its configuration."""
    new_model("qwen3").save_pretrained(tmp_path)
    return load_config(str(tmp_path))


def simulate_gpus(monkeypatch: pytest.MonkeyPatch, cuda: bool = True, checks: Any = ()) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(choice, "check_kernels", lambda *_: list(checks))
    monkeypatch.setattr("sparse_rl.commands.memory.device_memory", lambda: None)


def shown(start: str | tuple[str, ...], name: str, config: Any, *keys: str) -> list[str]:
    """Return the lines of `doctor` for a recipe and a model that begin so."""
    recipe = load_recipe(name, [f"model={config.name_or_path}", *keys])
    return [line for line in doctor.fit(recipe, config)[1] if line.startswith(start)]


def test_doctor_shows_if_redundancy_and_top_k_run_in_triton_or_torch(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each that a recipe needs on a GPU, with the reason. Without a GPU it prints none."""
    start = "redundancy", "running top-k"
    cache = "cache={policy: gkv, budget: 40, window: 8, period: 8}"
    gkv = start, "quickstart/grpo", config, "dtype=bfloat16", cache
    if not torch.cuda.is_available():
        assert shown(*gkv) == []
    simulate_gpus(monkeypatch)
    monkeypatch.setattr(choice, "check_target", lambda *_: Parity("flex"))
    (result,) = shown(*gkv)
    assert result.startswith("redundancy: ")
    assert shown(*gkv, "cache.redundancy=false") == []
    assert shown(*gkv, "dtype=float32") == ["redundancy: triton is not used: the keys are float32"]
    monkeypatch.setattr("sparse_rl.kernels.topk.check_topk", lambda: Parity("triton"))
    assert shown(start, "quickstart/kvpop", config) == ["running top-k: triton is exact here (error / allowed: )"]


def test_doctor_shows_the_check_of_both_flex_kernels(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recipe, doctor shows the checks of flex and flex_sorted on a GPU, and the kernel in use without a GPU."""
    if not torch.cuda.is_available():
        assert shown("attention kernel: gather (there is no GPU", "quickstart/grpo", config)
    simulate_gpus(monkeypatch, checks=[Parity("flex_sorted"), Parity("flex", failure="no")])
    assert shown("attention kernel: ", "quickstart/grpo", config) == [
        "attention kernel: flex_sorted is exact here (error / allowed: )",
        "attention kernel: flex is not used: no",
    ]


@pytest.mark.parametrize("cuda", [True, False])
def test_doctor_compares_processes_with_gpus_where_there_are_gpus(
    cuda: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU it does not, since the recipe may be for another machine."""
    simulate_gpus(monkeypatch, cuda)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    lines = shown("launch.processes: ", "quickstart/grpo", config, "launch.processes=2")
    assert lines == ["launch.processes: 2 processes on 1 GPU; lower processes"] * cuda
