"""Before FlexAttention is used, `check_parity` compares it with the dense reference on this machine. The check passes
exact kernels and refuses all others, and `doctor` reports its result."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_rl.attention import choice
from sparse_rl.attention.choice import choose_kernel
from sparse_rl.attention.kernels import flex
from sparse_rl.attention.parity import Parity, check_parity, random_evictions
from sparse_rl.commands import doctor
from sparse_rl.errors import UserError
from sparse_rl.kernels.choice import Choice
from sparse_rl.models.load import load_config
from sparse_rl.recipe import load_recipe

SHAPES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "length": 256}
CONFIG = SimpleNamespace(num_hidden_layers=2, num_key_value_heads=2, num_attention_heads=4, head_dim=16)


@pytest.fixture
def flex_on_cpu(flex_trains: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make FlexAttention differentiable on a CPU, with several segments in 256 tokens."""
    monkeypatch.setattr(flex, "segment_of", lambda _: 128)


@pytest.mark.parametrize("kernel", ["flex", "flex_sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_kernels_pass_the_check(kernel: str, dtype: torch.dtype, flex_on_cpu: None) -> None:
    """The errors of output, gradients and log-sum-exp are reported, and each is within its allowed error."""
    parity = check_parity(kernel, "cpu", dtype, **SHAPES)
    assert parity.failure is None
    assert set(parity.errors) == {"out", "dq", "dk", "dv", "lse"}
    assert all(0 <= error <= allowed for error, allowed in parity.errors.values())
    assert str(parity).startswith(f"{kernel} is exact here (error / allowed: out ")


def wrong_dq(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A fault as on Hopper: the forward pass is right, and the gradient of q is wrong by 2 %."""
    return out + 0.02 * (q - q.detach()), lse


def wrong_out(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out * 1.02, lse


def wrong_lse(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out, None if lse is None else lse + 0.01


def nan(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out * torch.where(torch.arange(out.shape[2])[:, None] == 9, torch.nan, 1.0), lse


def in_padding(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """A fault in the padding at the end of the second row."""
    last = torch.zeros(2, 1, out.shape[2], 1, dtype=torch.bool)
    last[1, :, -1] = True
    return torch.where(last, 1.0, out), lse


class NaNInPadding(torch.autograd.Function):
    """The identity, with a gradient that is NaN only in padding. In a model, any product with this gradient would make
    the gradients of weights NaN.
    """

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        grad[1, :, -1] = torch.nan
        return grad


def nan_in_the_gradient_of_padding(out: torch.Tensor, lse: Any, q: torch.Tensor) -> tuple[torch.Tensor, Any]:
    return out + 0 * NaNInPadding.apply(q), lse


@pytest.mark.parametrize(
    ("fault", "visible_in"),
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
def test_wrong_kernels_fail_the_check(
    fault: Callable, visible_in: list[str], dtype: torch.dtype, flex_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with one fault fails the check, and the one-line failure names the quantities in which the fault shows:
    output, gradient of the query ("dq") or log-sum-exp.
    """
    attend = flex.flex_attend
    faulty = lambda evict_at, q, *args, **kwargs: fault(*attend(evict_at, q, *args, **kwargs), q)  # noqa: E731
    monkeypatch.setattr("sparse_rl.attention.kernels.masked.flex_attend", faulty)
    monkeypatch.setattr("sparse_rl.attention.parity.flex_attend", faulty)
    parity = check_parity("flex_sorted", "cpu", dtype, **SHAPES)
    assert parity.failure is not None
    assert parity.failure.startswith("it is not exact on this machine (error / allowed: ")
    assert all(f"{name} " in parity.failure for name in visible_in)


def test_a_kernel_that_raises_is_not_used() -> None:
    """On a CPU the kernel `flex` raises, because torch refuses to compute its gradients. The check reports that `flex`
    is not used, and quotes torch's message in one line.
    """
    parity = check_parity("flex", "cpu", torch.float32, **SHAPES)
    assert parity.failure is not None
    assert parity.failure.startswith("NotImplementedError: FlexAttention does not support backward on CPU.")
    assert "\n" not in str(parity)
    assert str(parity).startswith("flex is not used: ")


def test_the_check_uses_padded_rows_and_evictions_that_differ_between_heads() -> None:
    """In the check's random evictions, row 0 has no padding, and row 1 has 50 columns of padding on each side. Heads
    differ in their evictions. Tokens live for about 40 queries on average (the median is lower), and some are never
    evicted.
    """
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
    """`auto` chooses gather and gives the reason. The kernels gather, sdpa and dense are used if they are named. If
    flex, flex_sorted or an unknown kernel is named, the error is about the key `attention_kernel`.
    """
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_kernel("auto", [CONFIG], "float32") == (
        "gather", "gather (there is no GPU, and on a CPU FlexAttention has no backward)"
    )  # fmt: skip
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
    """On a simulated GPU, `auto` takes the first of flex_sorted, flex and gather that passes the check; gather is not
    checked. A kernel that the recipe names is used if it passes, and is an error if it fails (`chosen` is None).
    """
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
    monkeypatch.setattr("sparse_rl.attention.parity.check_parity", check)
    if chosen is None:
        with pytest.raises(UserError, match=r"^attention_kernel: flex_sorted is not used: .*; use gather$"):
            choose_kernel(asked, [CONFIG], "float32")
        return
    kernel, finding = choose_kernel(asked, [CONFIG], "float32")
    assert kernel == chosen
    assert finding.endswith(
        f"{chosen} is exact here (error / allowed: ); checked in 0 s" if chosen != "gather" else "gather"
    )
    expected = {"flex_sorted": ["flex_sorted"], "flex": ["flex_sorted", "flex"], "gather": ["flex_sorted", "flex"]}
    assert checked == (expected[chosen] if asked == "auto" else [asked])


def test_the_check_reports_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reported seconds add up over the checks of all models, whether a check passes or fails."""
    monkeypatch.setattr(choice, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr("sparse_rl.attention.parity.check_parity", lambda kernel, *_, **__: Parity(kernel))
    monkeypatch.setattr("sparse_rl.attention.future_parity.check_target", lambda *_: Parity("flex", failure="no"))
    clock = iter((0.0, 31.4, 100.0, 107.0)).__next__
    (parity,) = choice.check_kernels(["flex"], [CONFIG, CONFIG], "float32", clock)
    assert str(parity) == "flex is exact here (error / allowed: ); checked in 31 s"
    assert str(choice.check_target(CONFIG, "float32", clock)) == "flex is not used: no; checked in 7 s"


def test_with_packing_a_kernel_must_be_exact_for_student_and_teacher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable
) -> None:
    """In distillation with packing, the teacher attends by the same kernel as the student. So `auto` refuses a kernel
    that fails for the teacher's 8 heads, even if it passes for the student's 4. Without packing only the student is
    checked.
    """
    new_model("qwen3", num_attention_heads=8).save_pretrained(tmp_path)
    new_model("qwen3", num_attention_heads=4).save_pretrained(tmp_path / "student")
    checked: list[tuple[str, int]] = []

    def check(kernel: str, *_: Any, heads: int, **__: Any) -> Parity:
        checked.append((kernel, heads))
        return Parity(kernel, failure="no" if (kernel, heads) == ("flex_sorted", 8) else None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sparse_rl.attention.parity.check_parity", check)

    def chosen(packing: str) -> str:
        keys = [f"model={tmp_path / 'student'}", f"teacher={tmp_path}", f"packing={packing}"]
        recipe = load_recipe("quickstart/distill", keys)
        return choose_kernel("auto", map(load_config, recipe.attending_models()), "float32")[0]

    assert chosen("true") == "flex"
    assert checked == [("flex_sorted", 4), ("flex_sorted", 8), ("flex", 4), ("flex", 8)]
    checked.clear()
    assert chosen("false") == "flex_sorted"
    assert checked == [("flex_sorted", 4)]


def test_doctor_shows_if_redundancy_and_top_k_run_in_triton_or_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable
) -> None:
    """For each of these computations that a recipe needs on a GPU, doctor prints a line with the implementation that is
    used, `triton` or `torch`, and the reason. Without a GPU it prints none.
    """
    new_model("qwen3").save_pretrained(tmp_path)
    config = load_config(str(tmp_path))

    def shown(name: str, *keys: str) -> list[str]:
        recipe = load_recipe(name, [f"model={tmp_path}", *keys])
        return [line for line in doctor.fit(recipe, config)[1] if line.startswith(("redundancy", "running top-k"))]

    gkv = "quickstart/grpo", "dtype=bfloat16", "cache={policy: gkv, budget: 40, window: 8, period: 8}"
    if not torch.cuda.is_available():
        assert shown(*gkv) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "check_kernels", lambda *_: [])
    monkeypatch.setattr(choice, "check_target", lambda *_: Parity("flex"))
    for module in ("machine", "memory"):
        monkeypatch.setattr(f"sparse_rl.commands.{module}.device_memory", lambda: None)
    result = shown(*gkv)
    assert len(result) == 1
    assert result[0].startswith("redundancy: ")
    assert shown(*gkv, "cache.redundancy=false") == []
    assert shown(*gkv, "dtype=float32") == ["redundancy: torch (the keys are float32)"]
    monkeypatch.setattr("sparse_rl.kernels.topk.topk_choice", lambda: Choice("triton", "1 ms, torch's form 2 ms"))
    assert shown("quickstart/kvpop") == ["running top-k: triton (1 ms, torch's form 2 ms)"]


def test_doctor_shows_the_check_of_both_flex_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable
) -> None:
    """With a recipe, doctor shows the checks of flex and flex_sorted on a GPU, and the kernel in use without a GPU."""
    new_model("qwen3").save_pretrained(tmp_path)
    recipe = load_recipe("quickstart/grpo", [f"model={tmp_path}"])
    config = load_config(str(tmp_path))
    if not torch.cuda.is_available():
        assert any(
            line.startswith("attention kernel: gather (there is no GPU") for line in doctor.fit(recipe, config)[1]
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "check_kernels", lambda *_: [Parity("flex_sorted"), Parity("flex", failure="no")])
    for module in ("machine", "memory"):
        monkeypatch.setattr(f"sparse_rl.commands.{module}.device_memory", lambda: None)
    shown = [line for line in doctor.fit(recipe, config)[1] if line.startswith("attention kernel: ")]
    assert shown == [
        "attention kernel: flex_sorted is exact here (error / allowed: )",
        "attention kernel: flex is not used: no",
    ]


@pytest.mark.parametrize(("cuda", "shown"), [(True, 1), (False, 0)])
def test_doctor_compares_processes_with_gpus_where_there_are_gpus(
    cuda: bool, shown: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, new_model: Callable
) -> None:
    """On a machine with GPUs, doctor compares the number of processes with the number of GPUs; without a GPU it does
    not, since the recipe may be for another machine.
    """
    new_model("qwen3").save_pretrained(tmp_path)
    recipe = load_recipe("quickstart/grpo", [f"model={tmp_path}", "launch.processes=2"])
    config = load_config(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(choice, "check_kernels", lambda *_: [])
    for module in ("machine", "memory"):
        monkeypatch.setattr(f"sparse_rl.commands.{module}.device_memory", lambda: None)
    lines = [line for line in doctor.fit(recipe, config)[1] if line.startswith("launch.processes: ")]
    assert lines == ["launch.processes: 2 processes on 1 GPU; lower processes"] * shown
