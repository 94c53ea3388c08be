"""Functions that return the memory of this machine, and format numbers of bytes."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def host_memory() -> int:
    """Return the bytes of host memory, or the limit of the control group if the limit is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def device_memory() -> int | None:
    """Return the bytes of memory of the first GPU; None if there is no GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def processor() -> str:
    """Return the number of cores and the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"


def show(size: float) -> str:
    """Format a number of bytes with a unit (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
