"""The Triton kernel of redundancy without a GPU: its results in Triton's interpreter (in float16, as that cannot
multiply bfloat16), and the check that runs before the kernel is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from without_gpu import run

from sparse_rl.kernels import redundancy
from sparse_rl.kernels.redundancy import check_redundancy, drawn_entries, total_similarity

INTERPRETED = """
from itertools import product
import torch
from sparse_rl.kernels import mean_similarity, redundancy
generator = torch.Generator().manual_seed(0)
compared = 0
for rows, heads, width, dim, lengths in (
    (1, 1, 1, 4, [1]), (1, 3, 2, 16, [2]), (2, 2, 31, 4, [31, 1]), (3, 1, 33, 64, [32, 33, 2]),
    (2, 1, 129, 16, [128, 129]), (2, 2, 150, 64, [150, 70]),
):
    # Keys of +-1 in 4, 16 or 64 dimensions: cosines are exact, many are 0.5, and many are equal. Some keys are 0.
    base = torch.randn(rows, heads, 2, dim, generator=generator).sign()
    which = torch.randint(2, (rows, heads, width, 1), generator=generator).expand(-1, -1, -1, dim)
    flipped = torch.rand(rows, heads, width, dim, generator=generator) < 0.15
    keys = base.gather(2, which) * torch.where(flipped, -1.0, 1.0)
    keys[:, :, 5::17] = 0
    keys, lengths = keys.half(), torch.tensor(lengths)
    keys.masked_fill_((torch.arange(width)[:, None] >= lengths[:, None, None, None]), torch.nan)  # padding is not read
    positions = 3 * torch.rand(rows, heads, width, generator=generator).argsort(-1)
    ours = mean_similarity(keys, positions, lengths, "triton")
    right = mean_similarity(keys, positions, lengths, "torch")
    assert ours.dtype == right.dtype and torch.equal(ours, right), (rows, heads, width, dim)
    alone = mean_similarity(keys[-1:], positions[-1:], lengths[-1:], "triton")
    assert torch.equal(alone[0], ours[-1])
    if lengths[0] > 30:
        assert right[0].max() * lengths[0] > 2, "few keys are similar"
        # control: in reverse order of position, another similar entry is the most recent
        assert not torch.equal(mean_similarity(keys, -positions % 999, lengths, "torch"), ours)
        slots = torch.randperm(int(lengths[0]), generator=generator)
        moved = mean_similarity(keys[:1, :, slots], positions[:1, :, slots], lengths[:1], "triton")
        assert torch.equal(moved, ours[:1, :, slots]), "the order of the cache slots changes the result"
        # a key that is not finite spoils all shares (policies/rules.py) of its head, and of no other head
        for kernel, value in product(("torch", "triton"), (torch.nan, torch.inf)):
            keys[0, 0, 7, 0] = value
            wrong = mean_similarity(keys, positions, lengths, kernel).softmax(-1)[0].isnan()
            assert wrong[0].all() and not wrong[1:].any(), (kernel, value)
    compared += 1
redundancy.CHECKED = 140  # the check with random keys, up to rounding
parity = redundancy.check_redundancy(torch.float16, 80, "cpu")
assert parity.failure is None, parity
print("compared", compared)
"""


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """6 cases, to the last bit, since the keys are chosen so that their cosines are exact."""
    assert "compared 6" in run(INTERPRETED, TRITON_INTERPRET="1")


# ---- the check -----------------------------------------------------------------------------------------------------


def exact_form(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Compute what the kernel computes, by the reference in float32."""
    total = torch.zeros(positions.shape)
    for row, length in enumerate(lengths.tolist()):
        total[row, :, :length] = total_similarity(keys[row, :, :length].float(), positions[row, :, :length].argsort(-1))
    return total


def padding_counts(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A wrong kernel: the padding of the second row counts, and holds keys."""
    return exact_form(keys.where(keys.isfinite(), keys[:1]), positions, torch.full_like(lengths, keys.shape[2]))


def rounded_norms(keys: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    return exact_form((keys / keys.float().norm(dim=-1, keepdim=True)).bfloat16(), *given)


def raises(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("form", "failure"),
    [
        (exact_form, None),
        (lambda keys, at, lengths: exact_form(keys, at.max() - at, lengths), "error / allowed: sum "),
        (padding_counts, "error / allowed: sum "),
        (rounded_norms, "error / allowed: sum "),
        (lambda *given: exact_form(*given) + torch.nan, "error / allowed: sum inf"),
        (lambda *given: exact_form(*given) * 1.001, "error / allowed: sum 1.0e-03 / 3.0e-05"),
        (lambda keys, *given: exact_form(keys, *given) * (1 + 2**-23 * len(keys)), "error / allowed: row alone "),
        (raises, "RuntimeError: out of resource: shared memory"),
    ],
    ids=["exact", "oldest", "padding", "norms", "nan", "factor", "batch", "raises"],
)
@pytest.mark.parametrize("dim", [16, 80])
def test_only_a_correct_kernel_passes_the_check(
    form: Callable, failure: str | None, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong form (implementation) is not used, and the result gives the reason."""
    monkeypatch.setattr(redundancy, "_triton_form", lambda: form)
    parity = check_redundancy.__wrapped__(torch.bfloat16, dim, "cpu")
    assert (parity.failure is None) == (failure is None)
    assert (failure or "triton is exact here") in str(parity)
    assert "\n" not in str(parity)


@pytest.mark.parametrize("under", [0.4, 0.5, 0.6])
def test_the_check_detects_a_wrong_threshold_of_similarity(under: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys are similar if their cosine is at least 0.5, including exactly 0.5."""
    right = total_similarity

    def with_other_threshold(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(redundancy, "UNDER", under)
            return exact_form(keys, positions, lengths)

    monkeypatch.setattr(redundancy, "_triton_form", lambda: with_other_threshold)
    assert check_redundancy.__wrapped__(torch.bfloat16, 64, "cpu").failure is not None
    assert redundancy.total_similarity is right


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_no_cosine_in_the_check_is_near_the_threshold(dim: int) -> None:
    """Except exactly 0.5 in the first row, none within 0.005, so that rounding cannot change the similar keys."""
    keys, _, lengths = drawn_entries(torch.bfloat16, dim)
    for row, length in enumerate(lengths.tolist()):
        unit = torch.nn.functional.normalize(keys[row, :, :length].double(), dim=-1)
        cosine = unit @ unit.transpose(-1, -2)
        near, exact = (cosine - 0.5).abs() < 0.005, (cosine - 0.5).abs() < 1e-12
        assert torch.equal(near[0], exact[0])
        assert exact[0].sum() > 500
        assert not near[1].any()


def test_float32_keys_use_torch() -> None:
    assert check_redundancy(torch.float32, 128).failure == "the keys are float32"
