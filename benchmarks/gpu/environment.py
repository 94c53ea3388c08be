"""Describes the machine and the versions of a call: the lines of `sparse-rl doctor`, the driver, and two speeds."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from benchmarks.gpu.worker import Options, Row, attempt

PACKAGES = ("triton", "numpy", "pytest", "safetensors", "flash-attn", "flashinfer-python")


def describe(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield rows with a topic and a finding, and one row that says how results are measured."""
    import torch

    from benchmarks.results import measured
    from sparse_rl.commands.doctor import environment

    yield {"measured": measured()}
    for topic, finding in environment():
        yield {"topic": topic, "finding": finding}
    for package in PACKAGES:
        yield {"topic": package, "finding": _version(package)}
    yield {"topic": "kernel", "finding": platform.release()}
    if device == "cuda" and not torch.cuda.is_available():
        yield {"topic": "warning", "finding": "torch sees no GPU: all stages on cuda will fail"}
    elif device == "cuda":
        yield {"topic": "driver", "finding": _driver()}
        yield attempt({"topic": "matrix product"}, lambda: {"finding": _product_speed()})
        yield attempt({"topic": "copy"}, lambda: {"finding": _copy_speed()})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    if (tool := shutil.which("nvidia-smi")) is None:
        return "unknown: nvidia-smi is not installed"
    query = [tool, "--query-gpu=driver_version,name,memory.total,clocks.max.sm", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return ran.stdout.strip().replace("\n", "; ") or f"unknown: {ran.stderr.strip()}"


def _product_speed(size: int = 8192) -> str:
    import torch

    from benchmarks.gpu.timing import interleaved

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = interleaved({"product": lambda: a @ b}, "cuda", 10)["product"]
    assert isinstance(times, list), times
    return f"{2 * size**3 / statistics.median(times) / 1e9:.0f} TFLOP/s, {size} x {size} x {size} in bfloat16"


def _copy_speed(size: int = 2**31) -> str:
    import torch

    from benchmarks.gpu.timing import interleaved

    a, b = (torch.empty(size, device="cuda", dtype=torch.uint8) for _ in range(2))
    times = interleaved({"copy": lambda: b.copy_(a)}, "cuda", 10)["copy"]
    assert isinstance(times, list), times
    return f"{2 * size / statistics.median(times) / 1e9:.2f} TB/s, read and written"
