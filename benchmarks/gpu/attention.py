"""Attention under recorded evictions: parity with the reference, tiles visited, and speed, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import attentions
from benchmarks.gpu.evictions import evictions
from benchmarks.gpu.shapes import dtype_name, sizes
from benchmarks.gpu.timing import compared
from benchmarks.gpu.worker import FAILURE, NotRunError, Options, Row, attempt
from sparse_rl.attention import parity as parity_check
from sparse_rl.attention.kernels.flex import padded
from sparse_rl.attention.kernels.gather import make_chunks, visited_share
from sparse_rl.attention.kernels.masked import masked_attention
from sparse_rl.attention.kernels.tiles import make_tiles, segment_of, visible_share
from sparse_rl.attention.parity import check_parity

NAMES = {"sorted": "flex_sorted", "natural": "flex", "causal flex": "causal flex", "causal SDPA": "causal flash SDPA"}
WITHOUT_EVICTIONS = ("causal flex", "causal flash SDPA")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def parity(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each kernel and shape, with the errors and the allowed errors."""
    size, dtype = sizes(small), getattr(torch, dtype_name(device))
    _let_flex_train(device)
    shapes = [(size.heads, length) for length in sorted(size.lengths) if length <= size.dense]
    for (heads, kv_heads, dim), length in shapes:
        for kernel in ("flex_sorted", "flex", "gather"):
            keys = {"kernel": kernel, "S": length, "heads": f"{heads}/{kv_heads} of {dim}", "dtype": str(dtype)}
            if not options.measured(**keys):
                shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "length": length}
                yield attempt(keys, partial(_parity_row, kernel, device, dtype, shape))


def _parity_row(kernel: str, device: str, dtype: torch.dtype, shape: dict[str, int]) -> Row:
    result = (
        _gather_parity(device, dtype, **shape) if kernel == "gather" else check_parity(kernel, device, dtype, **shape)
    )
    errors = {name: f"{error:.1e} / {allowed:.1e}" for name, (error, allowed) in result.errors.items()}
    exact: Row = {
        "exact": result.failure is None,
        "largest error": max((e for e, _ in result.errors.values()), default=0.0),
    }
    if not result.errors:
        raise RuntimeError(result.failure)
    return {**exact, **errors}


def _gather_parity(
    device: str, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int, length: int
) -> parity_check.Parity:
    """Compare gather as `check_parity` compares flex, but without padding: under gather a padding query sees itself."""
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(1, h, length, head_dim, generator=generator).to(device, dtype) for h in shapes)
    evict_at = parity_check.random_evictions(1, kv_heads, length, max(1, length // 8), generator).to(device)

    def errors() -> parity_check.Errors:
        exact = parity_check._reference(evict_at, q, k, v, grad, head_dim**-0.5)
        attends = (
            partial(masked_attention, lambda: evict_at, scaling=head_dim**-0.5, kernel=name)
            for name in ("gather", "sdpa")
        )
        results = [parity_check._outcome(attend, q, k, v, grad) for attend in attends]
        triples = zip(("out", "dq", "dk", "dv"), *results, exact, strict=False)
        return {name: _judged(ours, sdpa, right, dtype) for name, ours, sdpa, right in triples}

    return parity_check.judged("gather", q.device, errors)


def _judged(ours: Tensor, sdpa: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error and the allowed error."""
    floor = parity_check.FLOOR[dtype] * float(right.abs().max())
    allowed = max(parity_check.ALLOWED * parity_check.distance(sdpa, right), floor)
    return parity_check.distance(ours, right), allowed


def speed(device: str, small: bool, options: Options) -> Iterator[Row]:
    """Yield a row for each sequence length, kernel, and passes (forward and backward, or forward)."""
    size = sizes(small)
    _let_flex_train(device)
    for length in size.lengths:
        for passes in ("forward and backward", "forward"):
            keys = {"S": length, "passes": passes}
            if options.measured(**keys):
                continue
            try:
                yield from _timed(keys, device, small, options)
            except NotRunError:
                raise
            except Exception as error:  # such as too little memory for the reference
                yield attempt(keys, partial(_raise, error))


def _raise(error: Exception) -> Row:
    raise error


def _timed(keys: Row, device: str, small: bool, options: Options) -> list[Row]:
    size, dtype = sizes(small), getattr(torch, dtype_name(device))
    heads, kv_heads, dim = size.heads
    length, trains = keys["S"], keys["passes"] != "forward"
    evict_at, origin = evictions(device, small, options, length)
    if len(evict_at) != kv_heads:
        evict_at = evict_at.repeat(-(-kv_heads // len(evict_at)), 1)[:kv_heads]
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, kv_heads, kv_heads, heads)
    q, k, v, grad = (torch.randn(1, h, length, dim, generator=generator).to(device, dtype) for h in shapes)
    attends = _attends(evict_at[None], dim**-0.5, device, length <= size.masks)

    def run(attend: Attend, *given: Tensor, upstream: Tensor = grad) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(trains):
            inputs = [x.detach().requires_grad_(trains) for x in given]
            out = attend(*inputs)
            return (out.detach(), *torch.autograd.grad(out, inputs, upstream)) if trains else (out,)

    works = {name: partial(run, attend, q, k, v) for name, attend in attends.items()}
    rows = compared(works, device, size.runs, reference="flex")
    exact = run(attends["gather"], *(x.double() for x in (q, k, v)), upstream=grad.double())
    tiles = _tiles(evict_at)
    for name, row in rows.items():
        row |= {"tiles": tiles[name]} if name in tiles else {}
        if FAILURE not in row and name not in WITHOUT_EVICTIONS:
            errors = [float((a.double() - b).abs().max()) for a, b in zip(works[name](), exact, strict=True)]
            row |= dict(zip(("error out", "error dq", "error dk", "error dv"), errors, strict=False))
    shape = {"heads": f"{heads}/{kv_heads} of {dim}", "dtype": str(dtype), "evictions": origin}
    return [{**keys, "kernel": name, **row, **shape} for name, row in rows.items()]


def _attends(evict_at: Tensor, scaling: float, device: str, with_masks: bool) -> dict[str, Attend]:
    """Return name -> attend(q, k, v), with the kernels' names in recipes. evict_at : [1, Hkv, S]"""
    on_gpu = device == "cuda"
    ours = attentions(evict_at, scaling, grouped=on_gpu, compiled=on_gpu)
    attends = {NAMES[name]: attend for name, attend in ours.items()}
    for kernel in ("gather", *(["sdpa"] * with_masks)):
        attends[kernel] = partial(masked_attention, lambda: evict_at, scaling=scaling, kernel=kernel)
    return attends


def _tiles(evict_at: Tensor) -> dict[str, float]:
    """Return the share of tiles that a kernel visits; for gather, of the pairs that it computes."""
    length = evict_at.shape[-1]
    width = padded(length)
    return {
        "flex_sorted": make_tiles(evict_at, width, segment_of(width)).visited,
        "flex": make_tiles(evict_at, width).visited,
        "gather": visited_share(make_chunks(evict_at)),
        "sdpa": 1.0,
        "causal flex": make_tiles(torch.full_like(evict_at, 2 * length), width).visited,
        "causal flash SDPA": visible_share(torch.full_like(evict_at, length)),
    }


def _let_flex_train(device: str) -> None:
    """On a CPU, let torch differentiate FlexAttention's plain operator, which it otherwise refuses."""
    if device == "cpu":
        module: Any = importlib.import_module("torch.nn.attention.flex_attention")
        module._validate_device = lambda *_: None
