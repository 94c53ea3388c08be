"""Which attention kernel trains here: what `auto` means on this machine and for these models, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from sparse_rl.attention.parity import Parity

BEST_FIRST = ("flex_sorted", "flex")  # those that a GPU must be found exact with


def check_kernels(kernels: Sequence[str], configs: Iterable[Any], dtype: str) -> Iterator[Parity]:
    """Each of these kernels on this process's GPU, at the shapes of all models: compiles, and takes seconds.

    configs : of the models, read only where a kernel is checked; dtype : torch's name of what they compute in
    """
    import torch

    from sparse_rl.attention.parity import check_parity

    place = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()  # as accelerate has it
    device, configs = torch.device("cuda", place), list(configs)
    for kernel in kernels:
        for config in configs:
            _, kv_heads, head_dim = cache_shape(config)
            shape = {"heads": config.num_attention_heads, "kv_heads": kv_heads, "head_dim": head_dim}
            parity = check_parity(kernel, device, getattr(torch, dtype), **shape)
            if parity.failure is not None:
                break
        yield parity


def choose_kernel(wanted: str, configs: Iterable[Any], dtype: str) -> tuple[str, str]:
    """(the kernel, the finding in words).

    wanted : a kernel, or auto, which takes the best that is exact here
    configs, dtype : as in check_kernels

    Raises UserError where flex or flex_sorted is asked for by name and is not exact, or not to be had, here.
    """
    if wanted in ("sdpa", "dense"):
        return wanted, wanted
    import torch

    if not torch.cuda.is_available():
        why = "there is no GPU, and on a CPU FlexAttention has no backward"
        if wanted != "auto":
            raise UserError(f"{why}; use sdpa", "attention_kernel")
        return "sdpa", f"sdpa ({why})"
    findings = []
    for parity in check_kernels(BEST_FIRST if wanted == "auto" else (wanted,), configs, dtype):
        findings.append(str(parity))
        if parity.failure is None:
            return parity.kernel, "; ".join(findings)
    if wanted != "auto":
        raise UserError(f"{findings[0]}; use sdpa", "attention_kernel")
    return "sdpa", "; ".join([*findings, "sdpa"])
