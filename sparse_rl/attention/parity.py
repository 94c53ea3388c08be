"""Which attention kernel this machine may train with: FlexAttention's, once it has been found exact here.

Compiled kernels have given wrong gradients on some GPUs and versions, silently. So before one is used, its output,
gradients and log-sum-exp are compared, at the model's numbers of heads and head size, with the float64 reference: its
error may be twice that of SDPA in the same dtype. What does not pass is not used.
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
LENGTH = 2048  # tokens of the check
ALLOWED = 2.0  # times the error of SDPA in the same dtype
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-4}  # of the largest value: below it, noise
LSE = 1e-3  # allowed |error|; it is computed in float32 in any case


@dataclass(frozen=True)
class Parity:
    """errors : of out, dq, dk, dv and lse, (the kernel's, what is allowed); failure: why it is not used, or None.

    seconds : that the check took, compiling included; None: not measured
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
    """Compare flex or flex_sorted with the reference: two rows of `length` tokens, one of them padded on both sides."""
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
        for name, a, b, right in zip(("out", "dq", "dk", "dv"), ours, sdpa, wanted, strict=False):
            if name == "out":  # padding: there flex sees nothing and gives 0, the others see themselves
                b, right = b * real, right * real
            floor = FLOOR[dtype] * float(right.abs().max())
            errors[name] = distance(a, right), max(ALLOWED * distance(b, right), floor)
        errors["lse"] = distance(lse.where(real[..., 0], 0), wanted[-1].where(real[..., 0], 0)), LSE
        return errors

    return judged(kernel, q.device, compared)


def judged(kernel: str, device: torch.device, compared: Callable[[], Errors]) -> Parity:
    """The finding on a kernel, by a comparison on this device; what that raises is a finding, too."""
    try:
        errors = compared()
    except Exception as error:  # whatever a compiler or kernel raises, it says that this kernel is not to be had here
        return Parity(kernel, failure=in_a_line(error))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # an engine beside us counts what is free
    if bad := {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}:  # NaN is bad, too
        return Parity(kernel, errors, f"it is not exact on this machine (error / allowed: {_ratios(bad)})")
    return Parity(kernel, errors)


def random_evictions(rows: int, kv_heads: int, length: int, budget: int, generator: torch.Generator) -> Tensor:
    """int32 [rows, kv_heads, length]: a token outlives its own step by `budget` on average, some stay for ever.

    Row r has r sixths of its length as padding on either side, which has 0.
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
    """(out, dq, dk, dv)"""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad((out * grad).sum(), inputs)


def _reference(evict_at: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scaling: float) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv, lse) in float64, one query head at a time: one head's S x S is alive."""
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    lse = q.new_zeros(q.shape[:3])
    for head in range(q.shape[1]):
        kv = head * k.shape[1] // q.shape[1]
        visible = visible_mask(evict_at[:, kv : kv + 1])
        here, there = slice(head, head + 1), slice(kv, kv + 1)
        parts = q[:, here], k[:, there], v[:, there]
        attend: Attend = partial(dense_attention, visible=visible, scaling=scaling)
        one = _outcome(attend, *parts, grad[:, here])
        out[:, here], dq[:, here] = one[:2]
        dk[:, there] += one[2]
        dv[:, there] += one[3]
        scores = parts[0] @ parts[1].transpose(-1, -2) * scaling
        lse[:, here] = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    return out, dq, dk, dv, lse


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors of one shape."""
    return float((a.double() - b.double()).abs().max())


def _ratios(errors: Errors) -> str:
    return ", ".join(f"{name} {error:.1e} / {allowed:.1e}" for name, (error, allowed) in errors.items())
