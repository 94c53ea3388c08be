"""Choice of the attention kernel for training if the recipe says `auto`. It depends on the machine and the models."""

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
    """Return True if `choose_kernel` compiles and checks kernels on a GPU for this setting, which takes a while."""
    import torch

    return torch.cuda.is_available() and (wanted == "auto" or wanted in BEST_FIRST)


def check_kernels(
    kernels: Sequence[str], configs: Iterable[Any], dtype: str, clock: Callable[[], float] = time.perf_counter
) -> Iterator[Parity]:
    """Check the kernels on this process's GPU, at the shapes of all models, and yield the result for each kernel."""
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
    """Check if FlexAttention computes the scorers' training target correctly on this process's GPU."""
    import torch

    from sparse_rl.attention import future_parity

    _, kv_heads, head_dim = cache_shape(config)
    shape, start = (config.num_attention_heads, kv_heads, head_dim), clock()
    parity = future_parity.check_target(own_device(), getattr(torch, dtype), shape)
    return dataclasses.replace(parity, seconds=clock() - start)


def own_device() -> Any:
    """Return this process's GPU, numbered as in accelerate."""
    import torch

    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def choose_kernel(wanted: str, configs: Iterable[Any], dtype: str) -> tuple[str, str]:
    """Return the name of the attention kernel for training, and the reason for the choice in words.

    wanted : a kernel, or auto, which chooses the best kernel that is exact on this machine
    configs : configurations of the models, read only when a kernel is checked

    Raises UserError if `wanted` is flex or flex_sorted, and is not exact or not available on this machine.
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
