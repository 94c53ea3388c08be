"""The parity check of attention kernels: training uses FlexAttention only if FlexAttention is exact on this machine.

Compiled kernels have silently given wrong gradients on some GPUs and versions. So the check compares the kernel's
output, gradients and log-sum-exp with the float64 reference, at the model's numbers of heads and head dimension. The
kernel's error may be at most twice the error of SDPA in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from sparse_rl.attention.kernels.dense import dense_attention
from sparse_rl.attention.kernels.flex import flex_attend
from sparse_rl.attention.kernels.masked import masked_attention, visible_mask
from sparse_rl.kernels.choice import in_a_line

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

    errors : name -> (error of the kernel, allowed error), for the output (out), the gradients of query, key and value
        (dq, dk, dv), and the log-sum-exp (lse); future_parity.py has other names
    failure : the reason why the kernel is not used; None means that it passed
    seconds : duration of the check, including compilation; None means not measured
    """

    kernel: str
    errors: Errors = field(default_factory=dict)
    failure: str | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        took = "" if self.seconds is None else f"; checked in {self.seconds:.0f} s"
        if self.failure:
            return f"{self.kernel} is not used: {self.failure}{took}"
        return f"{self.kernel} is exact here (error / allowed: {_ratios(self.errors)}){took}"


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
    """Compare flex or flex_sorted with the reference, on two rows of `length` tokens. The second row has padding."""
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
        options = {"in_segments": kernel == "flex_sorted", "compiled": q.is_cuda, "want_lse": True}
        with torch.no_grad():
            lse = flex_attend(evict_at, q, k, v, scaling, **options)[1]
        assert lse is not None
        errors = {}
        for name, by_kernel, by_sdpa, exact in zip(("out", "dq", "dk", "dv"), ours, sdpa, wanted, strict=False):
            if name == "out":  # in flex, a padding query sees no key and gives 0; in the others, it sees itself
                by_sdpa, exact = by_sdpa * real, exact * real
            floor = FLOOR[dtype] * float(exact.abs().max())
            errors[name] = distance(by_kernel, exact), max(ALLOWED * distance(by_sdpa, exact), floor)
        errors["lse"] = distance(lse.where(real[..., 0], 0), wanted[-1].where(real[..., 0], 0)), LSE
        return errors

    return judged(kernel, q.device, compared)


def judged(kernel: str, device: torch.device, compared: Callable[[], Errors]) -> Parity:
    """Run a comparison and return its result. The kernel fails if the comparison raises an exception."""
    try:
        errors = compared()
    except Exception as error:  # any exception of a compiler or kernel means that the kernel is unusable here
        return Parity(kernel, failure=in_a_line(error))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # an engine on the same GPU measures the free memory
    if bad := {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}:  # NaN counts as bad
        return Parity(kernel, errors, f"it is not exact on this machine (error / allowed: {_ratios(bad)})")
    return Parity(kernel, errors)


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
    """Return the output, the gradients of query, key and value, and the log-sum-exp, computed in float64.

    Query heads are processed one at a time, so that only one tensor of tokens x tokens is kept.
    """
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    lse = q.new_zeros(q.shape[:3])
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        visible = visible_mask(evict_at[:, kv : kv + 1])
        q_slice, kv_slice = slice(head, head + 1), slice(kv, kv + 1)
        parts = q[:, q_slice], k[:, kv_slice], v[:, kv_slice]
        attend: Attend = partial(dense_attention, visible=visible, scaling=scaling)
        outcome = _outcome(attend, *parts, grad[:, q_slice])
        out[:, q_slice], dq[:, q_slice] = outcome[:2]
        dk[:, kv_slice] += outcome[2]
        dv[:, kv_slice] += outcome[3]
        scores = parts[0] @ parts[1].transpose(-1, -2) * scaling
        lse[:, q_slice] = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    return out, dq, dk, dv, lse


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def _ratios(errors: Errors) -> str:
    return ", ".join(f"{name} {error:.1e} / {allowed:.1e}" for name, (error, allowed) in errors.items())
