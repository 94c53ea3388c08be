"""running_topk and its Triton kernel on a GPU, where programs run in parallel, equal the reference that uses a heap.
The interpreter of other tests runs one program after another.
"""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kernels import running_topk, running_topk_reference
from sparse_rl.kernels.topk import topk_choice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kernel", [None, "torch", "triton"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "k"), [(1, 1, 1), (300, 8, 17), (4500, 256, 2016), (9000, 16, 5), (20000, 256, 4032)]
)
def test_equals_the_heap(length: int, window: int, k: int, ties: bool, kernel: str | None) -> None:
    generator = torch.Generator().manual_seed(length)
    scores = torch.randn(2, 3, length, generator=generator)
    scores = scores.round() if ties else scores
    given = {"window": window, "k": k, "lengths": torch.tensor([length, length * 2 // 3])}
    decay = torch.tensor([-1e-3, -1e-6, -0.1])
    right = running_topk_reference(scores, 1, log_decay=decay, **given)
    for _ in range(5):  # a race may not show in the first run
        ours = running_topk(scores.cuda(), 1, log_decay=decay.cuda(), kernel=kernel, **given)
        for name in ("evict_at", "cutoff_rank", "boundary"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(right, name)), name


def test_the_triton_kernel_passes_the_exactness_check() -> None:
    """The Triton kernel is chosen, or the finding gives the times that show that it is slower than torch's form."""
    topk = topk_choice()
    print(topk)
    assert topk.kernel == "triton" or " ms, torch's form " in topk.finding
