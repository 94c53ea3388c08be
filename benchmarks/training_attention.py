"""The cost of attention under evictions in training on a CPU: CPU seconds, forward and backward, on one thread.

Measured are one attention layer, and a model of four layers, on one sequence of S tokens. The evictions keep the tokens
with the best random scores. The columns are PyTorch's causal SDPA in float32, and

    masks       SDPA under S x S masks, in float64 (`attention_kernel: sdpa`)
    gather      SDPA over the keys that a chunk of queries sees, in float64: the choice of `auto` on a CPU
    float32     gather in float32 (`rollout.exact: false`)

    OMP_NUM_THREADS=1 python benchmarks/training_attention.py     # writes benchmarks/results/training_attention.json
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.cpu_seconds import seconds, show
from benchmarks.results import write
from sparse_rl.attention import NO_MASK, adopt, compute_exactly, make_view
from sparse_rl.kernels import running_topk
from sparse_rl.trace import NEVER, EvictionTrace

HEADS, KV_HEADS, DIM, LAYERS = 8, 2, 32, 4
SIZES = [(1056, 256), (2048, 256), (4096, 256), (4096, 1024)]  # tokens, budget
SINKS, WINDOW = 4, 16
OURS = {"masks": ("sdpa", True), "gather": ("gather", True), "float32": ("gather", False)}


def trace(layers: int, length: int, budget: int) -> EvictionTrace:
    scores = torch.randn(layers, KV_HEADS, length, generator=torch.Generator().manual_seed(0))
    evict_at = running_topk(scores, SINKS, window=WINDOW, k=budget - SINKS - WINDOW).evict_at
    return EvictionTrace(evict_at.masked_fill(evict_at >= length - 1, NEVER))


def one_layer(length: int, budget: int) -> dict[str, Callable[[], Any]]:
    generator, recorded = torch.Generator().manual_seed(0), trace(1, length, budget)
    q, k, v, grad = (torch.randn(1, h, length, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))

    def train(attend: Callable[..., torch.Tensor]) -> None:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(attend(*given), given, grad)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(kernel: str, exact: bool) -> None:
        compute_exactly(exact)
        view = make_view([recorded], [0], length, "cpu", kernel)
        train(lambda q, k, v: view.attend(0, q, k, v, DIM**-0.5))

    works: dict[str, Callable[[], Any]] = {"causal SDPA": lambda: train(plain)}
    return works | {name: lambda setting=setting: ours(*setting) for name, setting in OURS.items()}


def a_model(length: int, budget: int) -> dict[str, Callable[[], Any]]:
    config = Qwen2Config(
        vocab_size=512, hidden_size=HEADS * DIM, intermediate_size=2 * HEADS * DIM, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    model, recorded = Qwen2ForCausalLM(config), trace(LAYERS, length, budget)
    ids = torch.randint(0, 512, (1, length))

    def train(implementation: str, **further: Any) -> None:
        adopt(model) if implementation == "ours" else model.set_attn_implementation(implementation)
        model(input_ids=ids, use_cache=False, **further).logits.logsumexp(-1).mean().backward()
        model.zero_grad()

    def ours(kernel: str, exact: bool) -> None:
        compute_exactly(exact)
        train("ours", attention_mask=NO_MASK, kv_view=make_view([recorded], [0], length, "cpu", kernel))

    works: dict[str, Callable[[], Any]] = {"causal SDPA": lambda: train("sdpa")}
    return works | {name: lambda setting=setting: ours(*setting) for name, setting in OURS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="number of sizes, from the smallest")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training_attention.json"))
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timings: dict[str, list[dict[str, Any]]] = {}
    for title, works_of in (("one layer", one_layer), ("a model of four layers", a_model)):
        rows = timings[title] = []
        for length, budget in SIZES[: options.sizes]:
            works = works_of(length, budget)
            rows.append({"tokens": length, "budget": budget, **{n: seconds(w, options.runs) for n, w in works.items()}})
        show(f"CPU seconds of {title}, forward and backward (times causal SDPA)", rows, 2)
    compute_exactly(True)
    write(options.out, **timings)


if __name__ == "__main__":
    main()
