"""The Triton kernel without a GPU: its results under Triton's interpreter, and its registers as compiled for Hopper.

In processes of their own: TRITON_INTERPRET is read when a kernel is defined, and says whether it can be compiled.
The interpreter cannot see a missing barrier; tests/gpu/ can.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
COMPILED = """
import os, re, subprocess, tempfile, triton
from triton.backends.compiler import GPUTarget
from sparse_rl.kernels.topk_triton import compiled
kernel = compiled(GPUTarget("cuda", 90, 32), *BLOCKS)
tool = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(kernel.asm["cubin"])
    file.flush()
    said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
print(re.search(r"REG:.*", said.stdout + said.stderr).group(0))
"""


def run(program: str, **environment: str) -> str:
    pytest.importorskip("triton")
    known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    known |= {"PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=known, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_interpreted_it_equals_the_heap() -> None:
    assert "compared 10" in run(INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.parametrize("block", ["", pytest.param("16384", marks=pytest.mark.slow)])
def test_compiled_for_hopper_it_spills_nothing(block: str, tmp_path: Path) -> None:
    """What spills stands in LOCAL or on the STACK; it does where a block is too large."""
    said = run(COMPILED.replace("BLOCKS", f"[{block}]"), TRITON_CACHE_DIR=str(tmp_path))
    used = dict(pair.split(":") for pair in said.split() if ":" in pair)
    assert 0 < int(used["REG"]) <= 255
    assert (used["LOCAL"] == used["STACK"] == "0") is (block == "")
