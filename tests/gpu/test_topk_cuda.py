"""running_topk and its Triton kernel equal the reference with a heap on a GPU, where programs run in parallel. In other
tests, the interpreter runs one program after another.
"""

from __future__ import annotations

import pytest
import torch
from topk_reference import running_topk_reference

from sparse_rl.kernels import running_topk
from sparse_rl.kernels.topk import check_topk

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.first(0)]


@pytest.mark.parametrize("kernel", [None, "torch", "triton"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "k"), [(1, 1, 1), (300, 8, 17), (4500, 256, 2016), (9000, 16, 5), (20000, 256, 4032)]
)
def test_running_topk_equals_the_reference_with_a_heap(
    length: int, window: int, k: int, ties: bool, kernel: str | None
) -> None:
    generator = torch.Generator().manual_seed(length)
    scores = torch.randn(2, 3, length, generator=generator)
    scores = scores.round() if ties else scores
    options = {"window": window, "k": k, "lengths": torch.tensor([length, length * 2 // 3])}
    decay = torch.tensor([-1e-3, -1e-6, -0.1])
    expected = running_topk_reference(scores, 1, log_decay=decay, **options)
    for _ in range(5):  # a race may not show in the first run
        actual = running_topk(scores.cuda(), 1, log_decay=decay.cuda(), kernel=kernel, **options)
        for name in ("evict_at", "cutoff_rank", "boundary"):
            assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name


def test_the_triton_kernel_passes_the_check() -> None:
    assert check_topk().failure is None
