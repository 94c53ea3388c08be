"""The Triton kernel of the running top-k, tested without a GPU: its results in Triton's interpreter, the registers of
the compiled kernel, and the check that runs before the kernel is used.

The interpreter runs one program after another; tests/gpu/ runs them in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from without_gpu import resources_used, run

from sparse_rl.kernels.topk import check_topk, kth_smallest_of_prefixes

INTERPRETED = """
import torch
from sparse_rl.kernels import running_topk, running_topk_reference
from sparse_rl.kernels import topk_triton
topk_triton.BLOCK = 64  # several blocks a row, as long rows have
generator = torch.Generator().manual_seed(0)
compared = 0
for length, sinks, window, k, decay, ties in (
    (1, 0, 1, 1, None, False), (40, 4, 36, 1, None, True), (64, 4, 8, 8, None, False), (100, 0, 1, 5, -0.01, False),
    (257, 3, 16, 1, -0.001, True), (300, 4, 8, 400, None, False), (300, 4, 8, 289, None, True),
    (129, 1, 64, 63, None, True), (333, 0, 1, 64, -0.5, False), (200, 2, 4, 30, None, True),
):
    scores = torch.randn(2, 1, length, generator=generator)
    scores = scores.round() if ties else scores
    given = {
        "window": window, "k": k, "log_decay": None if decay is None else torch.tensor([decay]),
        "lengths": torch.tensor([length, length * 2 // 3]),
    }
    ours = running_topk(scores, sinks, kernel="triton", **given)
    right = running_topk_reference(scores, sinks, **given)
    for name in ("evict_at", "cutoff_rank", "boundary"):
        assert torch.equal(getattr(ours, name), getattr(right, name)), (length, sinks, window, k, ties, name)
    compared += 1
print("compared", compared)
"""


def test_the_interpreted_kernel_equals_the_heap() -> None:
    """The program INTERPRETED compares the kernel with the heap in 10 cases, bit for bit."""
    assert "compared 10" in run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_compiled_kernel_spills_no_registers(tmp_path: Path) -> None:
    report = resources_used("topk_triton", "[kernels.compiled(target)]", tmp_path)
    assert len(report) == 2
    assert all(0 < item["REG"] <= 255 and item["LOCAL"] == item["STACK"] == 0 for item in report)


@pytest.mark.slow
def test_control_a_block_that_is_too_large_spills_registers(tmp_path: Path) -> None:
    usage = resources_used("topk_triton", "[setattr(kernels, 'BLOCK', 16384) or kernels.compiled(target)]", tmp_path)
    assert all(entry["LOCAL"] + entry["STACK"] > 0 for entry in usage)


def triton_is_missing() -> Callable:
    raise ImportError("No module named 'triton'\nand more")


def off_by_one(ranks: torch.Tensor, k: int) -> torch.Tensor:
    result = kth_smallest_of_prefixes(ranks, k)
    result[-1, -1] += 1
    return result


@pytest.mark.parametrize(
    ("load", "seconds", "kernel", "finding"),
    [
        (lambda: kth_smallest_of_prefixes, [0.001, 0.002], "triton", "1.00 ms, torch's form 2.00 ms: 8 rows of 16384"),
        (lambda: kth_smallest_of_prefixes, [0.002, 0.002], "torch", "2.00 ms, torch's form 2.00 ms: 8 rows of 16384"),
        (lambda: off_by_one, [0.001, 0.002], "torch", "it gives wrong results here, for 3 rows of 1000 tokens"),
        (triton_is_missing, [0.001, 0.002], "torch", "ImportError: No module named 'triton'"),
    ],
)
def test_the_kernel_is_chosen_if_it_is_exact_and_faster(
    load: Callable, seconds: list, kernel: str, finding: str
) -> None:
    """`seconds` are the simulated times of the kernel and of torch's implementation ("form"). A kernel that is not
    faster, is wrong, or
    cannot be loaded is not used, and the choice gives the reason.
    """
    choice = check_topk(load, lambda work: seconds.pop(0), "cpu")
    assert choice.kernel == kernel
    assert finding in choice.finding
    assert "\n" not in str(choice)
    assert ("Triton's kernel is not used" in str(choice)) == (kernel == "torch")
