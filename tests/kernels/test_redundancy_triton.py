"""Redundancy's Triton kernel without a GPU: its results, its registers, and the check that runs before it.

The interpreter cannot multiply bfloat16, so it gets float16, which runs the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from without_gpu import run, used

from sparse_rl.kernels import redundancy
from sparse_rl.kernels.redundancy import check_redundancy, drawn_entries, total_similarity

INTERPRETED = """
import torch
from sparse_rl.kernels import mean_similarity, redundancy, redundancy_triton
generator = torch.Generator().manual_seed(0)
compared = 0
for rows, heads, width, dim, lengths in (
    (1, 1, 1, 4, [1]), (1, 3, 2, 16, [2]), (2, 2, 31, 4, [31, 1]), (3, 1, 33, 64, [32, 33, 2]),
    (2, 1, 129, 16, [128, 129]), (2, 2, 150, 64, [150, 70]),
):
    # Of 1 and -1, a power of 4 of them: cosines are exact, many are 0.5, and many are equal. And some keys are 0.
    base = torch.randn(rows, heads, 2, dim, generator=generator).sign()
    which = torch.randint(2, (rows, heads, width, 1), generator=generator).expand(-1, -1, -1, dim)
    flipped = torch.rand(rows, heads, width, dim, generator=generator) < 0.15
    keys = base.gather(2, which) * torch.where(flipped, -1.0, 1.0)
    keys[:, :, 5::17] = 0
    keys, lengths = keys.half(), torch.tensor(lengths)
    keys.masked_fill_((torch.arange(width)[:, None] >= lengths[:, None, None, None]), torch.nan)  # nobody reads padding
    positions = 3 * torch.rand(rows, heads, width, generator=generator).argsort(-1)
    ours = mean_similarity(keys, positions, lengths, "triton")
    right = mean_similarity(keys, positions, lengths, "torch")
    assert ours.dtype == right.dtype and torch.equal(ours, right), (rows, heads, width, dim)
    alone = mean_similarity(keys[-1:], positions[-1:], lengths[-1:], "triton")
    assert torch.equal(alone[0], ours[-1])
    if lengths[0] > 30:
        assert right[0].max() * lengths[0] > 2, "several are similar"
        assert not torch.equal(mean_similarity(keys, -positions % 999, lengths, "torch"), ours), "who is recent shows"
        slots = torch.randperm(int(lengths[0]), generator=generator)
        moved = mean_similarity(keys[:1, :, slots], positions[:1, :, slots], lengths[:1], "triton")
        assert torch.equal(moved, ours[:1, :, slots]), "slots are in no order"
        keys[0, 0, 7, 0] = torch.inf
        assert mean_similarity(keys, positions, lengths, "triton").isnan()[0].any()
    compared += 1
redundancy.CHECKED = 140  # and of any keys, up to rounding
choice = redundancy.check_redundancy(lambda: redundancy_triton.total_similarity, torch.float16, 80, "cpu")
assert choice.kernel == "triton", choice
print("compared", compared)
"""


def test_the_interpreted_kernel_equals_the_reference() -> None:
    """Equal to the last bit if no cosine is rounded."""
    assert "compared 6" in run(INTERPRETED, TRITON_INTERPRET="1")


def test_the_compiled_kernel_spills_no_registers(tmp_path: Path) -> None:
    """At least two programs also fit on one multiprocessor."""
    report = used("redundancy_triton", "kernels.compiled(target, 128)", tmp_path)
    assert len(report) == 4
    for item in report:
        assert item["LOCAL"] == item["STACK"] == 0
        assert 2 * item["REG"] * 32 * 8 <= 65536 and 2 * item["SHARED_BY_TRITON"] <= 160_000


@pytest.mark.slow
def test_larger_tiles_spill(tmp_path: Path) -> None:
    """The control."""
    small = "kernels.__dict__.update(COLUMNS=128, WARPS=4) or kernels.compiled(target, 128)"
    assert [entry["STACK"] > 0 for entry in used("redundancy_triton", small, tmp_path)] == [False, True] * 2


# ---- the check -----------------------------------------------------------------------------------------------------


def plain(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The kernel's function, computed by the reference in float32."""
    total = torch.zeros(positions.shape)
    for row, length in enumerate(lengths.tolist()):
        total[row, :, :length] = total_similarity(keys[row, :, :length].float(), positions[row, :, :length].argsort(-1))
    return total


def oldest(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return plain(keys, positions.max() - positions, lengths)


def of_all(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """A wrong kernel: the padding of the second row counts, and holds keys."""
    return plain(keys.where(keys.isfinite(), keys[:1]), positions, torch.full_like(lengths, keys.shape[2]))


def normalised_in_bfloat16(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    norm = keys.float().norm(dim=-1, keepdim=True)
    return plain((keys / norm).bfloat16(), positions, lengths)


def by_the_batch(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return plain(keys, positions, lengths) * (1 + 2**-23 * len(keys))


def raises(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory\nand more")


@pytest.mark.parametrize(
    ("form", "kernel", "finding"),
    [
        (plain, "triton", "error / allowed: "),
        (oldest, "torch", "error / allowed: "),
        (of_all, "torch", "error / allowed: "),
        (normalised_in_bfloat16, "torch", "error / allowed: "),
        (lambda *given: plain(*given) + torch.nan, "torch", "error / allowed: inf"),
        (lambda *given: plain(*given) * 1.001, "torch", "error / allowed: 1.0e-03 / 3.0e-05"),
        (by_the_batch, "torch", "a row depends on the batch; error / allowed: "),
        (raises, "torch", "RuntimeError: out of resource: shared memory"),
    ],
)
@pytest.mark.parametrize("dim", [16, 80])
def test_a_correct_kernel_is_chosen(form: Callable, kernel: str, finding: str, dim: int) -> None:
    choice = check_redundancy(lambda: form, torch.bfloat16, dim, "cpu")
    assert choice.kernel == kernel and finding in choice.finding and "\n" not in str(choice)


@pytest.mark.parametrize("under", [0.4, 0.5, 0.6])
def test_another_threshold_is_detected(under: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cosine of exactly 0.5 counts as similar."""
    right = total_similarity

    def wrong(keys: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(redundancy, "UNDER", under)
            return plain(keys, positions, lengths)

    assert check_redundancy(lambda: wrong, torch.bfloat16, 64, "cpu").kernel == "torch"
    assert redundancy.total_similarity is right


@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_no_cosine_in_the_check_is_near_the_threshold(dim: int) -> None:
    """The only exception is exactly 0.5, which occurs often."""
    keys, _, lengths = drawn_entries(torch.bfloat16, dim)
    for row, length in enumerate(lengths.tolist()):
        unit = torch.nn.functional.normalize(keys[row, :, :length].double(), dim=-1)
        cosine = unit @ unit.transpose(-1, -2)
        near, exact = (cosine - 0.5).abs() < 0.005, (cosine - 0.5).abs() < 1e-12
        assert torch.equal(near[0], exact[0]) and exact[0].sum() > 500 and not near[1].any()


def test_float32_keys_use_torch() -> None:
    assert str(redundancy.redundancy_choice(torch.float32, 128)) == "torch (the keys are float32)"
