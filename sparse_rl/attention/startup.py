"""The attention kernel of a training, before the first step: it is chosen, checked, and compiled.

Under `auto`, the choice depends on the machine and the models. FlexAttention is compiled ahead, because a graph takes
tens of seconds, so the first step would seem to hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_rl.attention.families import cache_shape
from sparse_rl.errors import UserError
from sparse_rl.kernels.masked import masked_attention
from sparse_rl.kernels.parity import Parity, check_future, check_parity
from sparse_rl.trace import NEVER

LARGEST_HEAD = 256  # FlexAttention's forward kernel for larger heads takes more shared memory than a GPU has
BEST_FIRST = ("flex_sorted", "flex")  # the kernels that must pass the parity check on a GPU, best first


def will_check(wanted: str) -> bool:
    """Return True if `choose_kernel` will compile and check kernels on a GPU for the setting `wanted`; this is slow."""
    return torch.cuda.is_available() and (wanted == "auto" or wanted in BEST_FIRST)


def check_kernels(kernels: Sequence[str], configs: Iterable[Any], dtype: str) -> Iterator[Parity]:
    """Check the kernels on this process's GPU, each at the shapes of all models; yield one result for each kernel."""
    device, configs = own_device(), list(configs)
    for kernel in kernels:
        for config in configs:
            _, kv_heads, head_dim = cache_shape(config)
            shape = {"heads": config.num_attention_heads, "kv_heads": kv_heads, "head_dim": head_dim}
            if head_dim > LARGEST_HEAD:
                parity = Parity(kernel, failure=f"heads of {head_dim} are larger than {LARGEST_HEAD}")
            else:
                parity = check_parity(kernel, device, getattr(torch, dtype), **shape)
            if parity.failure is not None:
                break
        yield parity


def check_target(config: Any, dtype: str) -> Parity:
    """Check FlexAttention's computation of the scorers' training target on this process's GPU."""
    _, kv_heads, head_dim = cache_shape(config)
    return check_future(own_device(), getattr(torch, dtype), (config.num_attention_heads, kv_heads, head_dim))


def own_device() -> Any:
    """Return this process's GPU: as in accelerate, LOCAL_RANK is its number."""
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


def compile_ahead(
    kernel: str, config: Any, rows: int, length: int, device: torch.device, dtype: torch.dtype, target: Any = None
) -> None:
    """Compile flex or flex_sorted for `rows` sequences padded to `length` tokens, with and without gradients, and
    the computation of a `FutureTarget`. Graphs depend on autocast, so call this under the training's autocast.
    """
    _, kv_heads, dim = cache_shape(config)
    heads = (config.num_attention_heads, kv_heads, kv_heads)
    query, key, value = (torch.zeros(rows, h, length, dim, device=device, dtype=dtype) for h in heads)
    evict_at = torch.full((rows, kv_heads, length), NEVER, dtype=torch.int32, device=device)
    scaling = dim**-0.5

    def attend() -> Tensor:
        return masked_attention(lambda: evict_at, query, key, value, scaling, kernel)

    with torch.no_grad():
        attend()
        if target is not None:
            target(query, key, scaling, 1, torch.full((rows, length), length, device=device), evict_at)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    torch.autograd.grad(attend().sum(), inputs)
