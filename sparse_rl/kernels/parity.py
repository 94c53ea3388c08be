"""The checks by which a process decides, on its own GPU, whether it uses a compiled kernel.

Compiled kernels have silently given wrong results, or gradients, on some GPUs and versions. So a kernel is compared
with its plain reference when a process first uses it, and is used only if it is exact there: FlexAttention by output,
gradients and log-sum-exp, at the model's numbers of heads and head dimension, whose error may be at most twice that of
SDPA in the same dtype; its transposed form by the logs of the future attention, which may differ by at most 1e-3; and
the Triton kernels of topk.py and redundancy.py by what these files say. `sparse-rl doctor RECIPE` shows the findings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sparse_rl.kernels.flex import flex_attend
from sparse_rl.kernels.future import Kernel, attention_lse, future_attention_mass
from sparse_rl.kernels.masked import dense_attention, masked_attention, visible_mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Errors = dict[str, tuple[float, float]]  # name -> (a kernel's error, the error that is allowed)
LENGTH = 2048  # sequence length of the check
ALLOWED = 2.0  # allowed error, as a multiple of the error of SDPA in the same dtype
# Errors below this share of the largest value are always allowed, as noise.
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-4}
LSE = 1e-3  # allowed |error| of the log-sum-exp, which is always computed in float32


@dataclass(frozen=True)
class Parity:
    """The result of a check of one kernel.

    errors : name -> (error of the kernel, allowed error)
    failure : the reason why the kernel is not used; None means that it passed
    """

    kernel: str
    errors: Errors = field(default_factory=dict)
    failure: str | None = None

    def __str__(self) -> str:
        if self.failure:
            return f"{self.kernel} is not used: {self.failure}"
        return f"{self.kernel} is exact here (error / allowed: {_ratios(self.errors)})"


def judged(kernel: str, device: torch.device | str, compared: Callable[[], Errors]) -> Parity:
    """Run a comparison and return its result. The kernel fails if the comparison raises an exception."""
    try:
        errors = compared()
    except Exception as error:  # any exception of a compiler or kernel means that the kernel is unusable here
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return Parity(kernel, failure=f"{type(error).__name__}: {first}")
    finally:
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # an engine on the same GPU measures the free memory
    if bad := {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}:  # NaN counts as bad
        return Parity(kernel, errors, f"it is not exact on this machine (error / allowed: {_ratios(bad)})")
    return Parity(kernel, errors)


def _ratios(errors: Errors) -> str:
    return ", ".join(f"{name} {error:.1e} / {allowed:.1e}" for name, (error, allowed) in errors.items())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def check_parity(
    kernel: str,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    length: int = LENGTH,
    seed: int = 0,
) -> Parity:
    """Compare flex or flex_sorted with the reference, on two rows of `length` tokens. The second row has padding.

    The errors are those of the output (out), the gradients of query, key and value (dq, dk, dv), and the log-sum-exp.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(2, h, length, head_dim, generator=generator).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    evict_at = random_evictions(2, kv_heads, length, max(1, length // 8), generator).to(device)
    real = evict_at[:, :1, :, None] > 0
    grad = grad * real
    scaling = head_dim**-0.5

    def compared() -> Errors:
        wanted = _reference(evict_at, q, k, v, grad, scaling)
        sdpa, ours = (
            _outcome(partial(masked_attention, lambda: evict_at, scaling=scaling, kernel=name), q, k, v, grad)
            for name in ("sdpa", kernel)
        )
        errors = {}
        for name, by_kernel, by_sdpa, exact in zip(("out", "dq", "dk", "dv"), ours, sdpa, wanted, strict=True):
            if name == "out":  # in flex, a padding query sees no key and gives 0; in the others, it sees itself
                by_sdpa, exact = by_sdpa * real, exact * real
            floor = FLOOR[dtype] * float(exact.abs().max())
            errors[name] = distance(by_kernel, exact), max(ALLOWED * distance(by_sdpa, exact), floor)
        options = {"in_segments": kernel == "flex_sorted", "compiled": q.is_cuda, "want_lse": True}
        with torch.no_grad():
            lse = flex_attend(evict_at, q, k, v, scaling, **options)[1]
        assert lse is not None
        right_lse = attention_lse(q.double(), k.double(), scaling=scaling, evict_at=evict_at)
        errors["lse"] = distance(lse.where(real[..., 0], 0), right_lse.where(real[..., 0], 0)), LSE
        return errors

    return judged(kernel, device, compared)


def random_evictions(rows: int, kv_heads: int, length: int, budget: int, generator: torch.Generator) -> Tensor:
    """Return a random evict_at, int32 [rows, kv_heads, length], where tokens live for `budget` steps on average.

    A few tokens are never evicted. Row r begins and ends with padding (evict_at 0), each of r sixths of the row.
    """
    shape = (rows, kv_heads, length)
    alive = torch.empty(shape).exponential_(1 / budget, generator=generator).long() + 1
    evict_at = (torch.arange(length) + alive).clamp(max=2 * length)
    evict_at[torch.rand(shape, generator=generator) < 0.02] = 2 * length
    for row in range(rows):
        pad = row * length // 6
        evict_at[row, :, :pad] = 0
        evict_at[row, :, length - pad :] = 0
    return evict_at.int()


def _outcome(attend: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad((out * grad).sum(), inputs)


def _reference(evict_at: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of query, key and value, computed in float64.

    Query heads are processed one at a time, so that only one tensor of tokens x tokens is kept.
    """
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    for head in range(q.shape[1]):
        kv_head = head * k.shape[1] // q.shape[1]
        one, kv = slice(head, head + 1), slice(kv_head, kv_head + 1)
        attend: Attend = partial(dense_attention, visible=visible_mask(evict_at[:, kv]), scaling=scaling)
        out[:, one], dq[:, one], of_key, of_value = _outcome(attend, q[:, one], k[:, kv], v[:, kv], grad[:, one])
        dk[:, kv] += of_key
        dv[:, kv] += of_value
    return out, dq, dk, dv


Shape = tuple[int, int, int]  # query heads, kv heads, head dim


def target_kernel(device: torch.device, dtype: torch.dtype, shape: Shape) -> Kernel:
    """Choose the kernel of the future attention. On a GPU, the first call compiles FlexAttention and checks it."""
    return "flex" if device.type == "cuda" and check_future(device, dtype, shape).failure is None else "torch"


@cache
def check_future(device: torch.device, dtype: torch.dtype, shape: Shape, length: int = LENGTH) -> Parity:
    """Compare FlexAttention's log of the future attention with the torch kernel's. The result is cached in the process.

    The inputs are two rows; the second has two documents and padding. The comparison runs with the log-sum-exp of a
    sparse attention, and again with the log-sum-exp of the dense attention.
    """
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    query, key = (2 * torch.randn(2, h, length, dim, generator=generator).to(device, dtype) for h in (heads, kv_heads))
    evict_at = random_evictions(1, kv_heads, length, max(1, length // 8), generator).expand(2, -1, -1).to(device)
    ends = torch.full((2, length), length, device=device)
    ends[1, : length // 3], ends[1, length // 3 :], ends[1, -(length // 6) :] = length // 3, length - length // 6, 0

    def mass(query: Tensor, key: Tensor, seen: Tensor | None, kernel: Kernel) -> Tensor:
        options: dict[str, Any] = {"scaling": dim**-0.5, "ends": ends, "kernel": kernel}
        lse = attention_lse(query, key, evict_at=seen, **options)
        return future_attention_mass(query, key, window=length // 16, log_sum_exp=lse, **options)

    def compared() -> Errors:
        errors = {}
        for name, seen in (("sparse", evict_at), ("dense", None)):
            ours, wanted = mass(query, key, seen, "flex"), mass(query.double(), key.double(), seen, "torch")
            unattended = (ours == wanted) & wanted.isinf()  # no query counts for these tokens
            errors[name] = distance(ours.masked_fill(unattended, 0), wanted.masked_fill(unattended, 0)), LSE
        return errors

    return judged("flex", device, compared)
