"""What can be proven of GPU code without a GPU: it compiles for one, and fits into its registers and shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="compiling needs Triton with its NVIDIA backend")
import compiling
from compiling import exceeded

from sparse_rl.kernels import redundancy_triton, topk_triton


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert Path(compiling.TOOL).exists()


def test_the_running_topk_fits_into_a_gpu() -> None:
    (used,) = compiling.topk()
    assert used["REG"] > 0
    assert not exceeded(used)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128, 256, pytest.param(72, marks=pytest.mark.slow)])
def test_redundancy_fits_into_a_gpu(dim: int, dtype: str) -> None:
    """And two programs on one multiprocessor, which has 65,536 registers and 228 kB. No kernel takes float32 keys, and
    72 is no multiple of 16, so that fewer bytes are loaded at a time."""
    for used in compiling.redundancy(dim, dtype):
        assert not exceeded(used)
        assert 2 * used["REG"] * 32 * redundancy_triton.WARPS <= 65_536
        assert 2 * used["SHARED"] <= 228 * 1024


@pytest.mark.slow
def test_kernels_fit_into_the_generation_before() -> None:
    """Ampere (sm_80) has 163 kB for a program."""
    for used in compiling.topk(80) + compiling.redundancy(128, "bf16", 80):
        assert not exceeded(used)
        assert used["SHARED"] <= 163 * 1024


def test_control_keys_that_are_too_long_exceed_shared_memory() -> None:
    assert [exceeded(used) for used in compiling.redundancy(1024)] == [set(), {"SHARED"}]


@pytest.mark.slow
def test_control_tiles_that_are_too_large_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_triton, "BLOCK", 16384)
    assert all({"STACK", "LOCAL"} & exceeded(used) for used in compiling.topk())
    monkeypatch.setattr(redundancy_triton, "COLUMNS", 128)
    monkeypatch.setattr(redundancy_triton, "WARPS", 4)
    assert [exceeded(used) for used in compiling.redundancy(128)] == [set(), {"STACK"}]
