"""Log-probs among kept tokens on a GPU: those of the CPU, and their gradients are the same bits in every run."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.attention.support import score_draws

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.first(0)]
DRAWS, VOCABULARY, WIDTH = 300, 20_000, 256


def scored(device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return kept, whole and entropy of draws, and the gradients of their sums, in host memory."""
    some = torch.Generator().manual_seed(0)
    hidden = torch.randn(DRAWS, WIDTH, generator=some).to(device, dtype).requires_grad_()
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False).to(device, dtype)
    head.weight.data.copy_(torch.randn(VOCABULARY, WIDTH, generator=some) / 8)
    sizes = torch.randint(1, 200, (DRAWS,), generator=some)
    kept = [torch.randperm(VOCABULARY, generator=some)[:size].sort().values for size in sizes.tolist()]
    labels, ids = torch.stack([ids[-1] for ids in kept]), torch.cat(kept).int()
    scores = score_draws(hidden, head, *(x.to(device) for x in (labels, sizes, ids)))
    gradients = torch.autograd.grad((scores.kept + scores.entropy).sum(), (hidden, head.weight))
    return [value.detach().cpu() for value in (*scores, *gradients)]


def test_scores_and_gradients_are_those_of_the_cpu() -> None:
    """The CPU is tested against whole logits. Control: in bfloat16 they differ."""
    for ours, theirs, half in zip(scored("cuda"), scored("cpu"), scored("cuda", torch.bfloat16), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert (half.float() - theirs).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_run_gives_the_same_bits(dtype: torch.dtype) -> None:
    assert all(map(torch.equal, scored("cuda", dtype), scored("cuda", dtype)))
