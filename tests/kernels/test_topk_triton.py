"""The Triton kernel of the running top-k without a GPU: its results in Triton's interpreter, which runs one program
after another, and the check that runs before the kernel is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from without_gpu import run

from sparse_rl.kernels.topk import check_topk, kth_smallest_of_prefixes

INTERPRETED = """
import torch
from topk_reference import running_topk_reference
from sparse_rl.kernels import running_topk
from sparse_rl.kernels import topk_triton
topk_triton.BLOCK = 64  # several blocks a row, as long rows have
generator = torch.Generator().manual_seed(0)
compared = 0
for length, sinks, window, k, decay, ties in (
    (1, 0, 1, 1, None, False), (40, 4, 36, 1, None, True), (64, 4, 8, 8, None, False), (100, 0, 1, 5, -0.01, False),
    (257, 3, 16, 1, -0.001, True), (140, 4, 8, 400, None, False), (140, 4, 8, 129, None, True),
    (129, 1, 64, 63, None, True),
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
    """8 cases, bit for bit."""
    assert "compared 8" in run(INTERPRETED, TRITON_INTERPRET="1")


def off_by_one(ranks: torch.Tensor, k: int) -> torch.Tensor:
    result = kth_smallest_of_prefixes(ranks, k)
    result[-1, -1] += 1
    return result


def out_of_memory(ranks: torch.Tensor, k: int) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("form", "failure"),
    [
        (kth_smallest_of_prefixes, None),
        (off_by_one, "(error / allowed: 3 rows of 1000 tokens 1.0e+00 / 0.0e+00"),
        (out_of_memory, "RuntimeError: out of resource: shared memory"),
    ],
)
def test_only_an_exact_kernel_passes_the_check(
    form: Callable, failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is wrong or raises is not used, and the result gives the reason in one line."""
    monkeypatch.setattr("sparse_rl.kernels.topk._triton_form", lambda: form)
    parity = check_topk.__wrapped__("cpu")
    assert (parity.failure is None) == (failure is None)
    assert (failure or "triton is exact here") in str(parity)
    assert "\n" not in str(parity)
