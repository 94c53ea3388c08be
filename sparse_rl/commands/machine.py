"""The memory that this machine has, and bytes as a person reads them."""

from __future__ import annotations

import os
from pathlib import Path


def host_memory() -> int:
    """Bytes of host memory, the limit of the control group included."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def device_memory() -> int | None:
    """Bytes of the first GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def show(size: float) -> str:
    """Bytes as a person reads them (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
