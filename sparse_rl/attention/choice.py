"""Choice of the attention kernel for training. Under `auto`, the choice depends on the machine and the models."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from sparse_rl.attention.parity import Parity

BEST_FIRST = ("flex_sorted", "flex")  # the kernels that must pass the parity check on a GPU, best first


def will_check(wanted: str) -> bool:
    """Return True if `choose_kernel` will compile and check kernels on a GPU for the setting `wanted`; this is slow."""
    import torch

    return torch.cuda.is_available() and (wanted == "auto" or wanted in BEST_FIRST)


def check_kernels(
    kernels: Sequence[str], configs: Iterable[Any], dtype: str, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Parity]:
    """Check the kernels on this process's GPU, each at the shapes of all models; yield one result for each kernel."""
    import torch

    from sparse_rl.attention.parity import check_parity

    device, configs = own_device(), list(configs)
    for kernel in kernels:
        start = clock()
        for config in configs:
            _, kv_heads, head_dim = cache_shape(config)
            shape = {"heads": config.num_attention_heads, "kv_heads": kv_heads, "head_dim": head_dim}
            parity = check_parity(kernel, device, getattr(torch, dtype), **shape)
            if parity.failure is not None:
                break
        yield dataclasses.replace(parity, seconds=clock() - start)


def check_target(config: Any, dtype: str, clock: Callable[[], float] = time.perf_counter) -> Parity:
    """Check FlexAttention's computation of the scorers' training target on this process's GPU."""
    import torch

    from sparse_rl.attention import future_parity

    _, kv_heads, head_dim = cache_shape(config)
    shape, start = (config.num_attention_heads, kv_heads, head_dim), clock()
    parity = future_parity.check_target(own_device(), getattr(torch, dtype), shape)
    return dataclasses.replace(parity, seconds=clock() - start)


def own_device() -> Any:
    """Return this process's GPU: as in accelerate, LOCAL_RANK is its number."""
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def choose_kernel(wanted: str, configs: Iterable[Any], dtype: str) -> tuple[str, str]:
    """Return the name of the attention kernel for training, and the reason for the choice in words.

    wanted : the name of a kernel; or auto, for the best kernel that is exact on this machine
    configs : configurations of the models, read only when a kernel is checked
    dtype : name of torch's dtype in which attention is computed, such as bfloat16

    Raises UserError if `wanted` is flex or flex_sorted, and this kernel is unavailable or not exact on this machine.
    """
    if wanted in ("gather", "sdpa", "dense"):
        return wanted, wanted
    import torch

    if not torch.cuda.is_available():
        reason = "there is no GPU, and on a CPU FlexAttention has no backward"
        if wanted != "auto":
            raise UserError(f"{reason}; use gather", "attention_kernel")
        return "gather", f"gather ({reason})"
    findings = []
    for parity in check_kernels(BEST_FIRST if wanted == "auto" else (wanted,), configs, dtype):
        findings.append(str(parity))
        if parity.failure is None:
            return parity.kernel, "; ".join(findings)
    if wanted != "auto":
        raise UserError(f"{findings[0]}; use gather", "attention_kernel")
    return "gather", "; ".join([*findings, "gather"])
