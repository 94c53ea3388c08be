"""Mixture of experts: the gap with and without the recorded experts, and the share of choices that rounding changes.

    OMP_NUM_THREADS=1 python benchmarks/experts.py

Models: `near tie`, a random Qwen3-MoE whose routers have pairs of experts with weights that differ by a factor of about
1 + 1e-7; and `quickstart`, the quickstart's trained model, each of whose MLPs became 8 experts, with noise of 20 %. The
sampler is the hf engine under G-KV; the trainer's attention runs in the given dtype, as on a GPU. Writes
benchmarks/results/experts.json, with gaps in nats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.results import show, write
from rollout import Rollout, SamplingConfig, make_engine
from sparse_rl.attention import compute_exactly, replay_logprobs
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views.factory import make_view
from sparse_rl.experts.routing import routers
from sparse_rl.experts.view import RoutedView
from sparse_rl.models.load import load_tokenizer
from sparse_rl.trace import EvictionTrace
from tests.upcycling import QUICKSTART, upcycled

ROOT = Path(__file__).parents[1]
CACHE = {"policy": "gkv", "budget": 40, "window": 8, "period": 8}
SEEDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="The gap with and without the recorded experts.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/experts.json")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    options = parser.parse_args()
    rows = [measure("near tie", near_tie(seed), "float32", seed) for seed in range(SEEDS)]
    for dtype in ("float32", "bfloat16"):
        rows += [
            measure("quickstart", upcycled(QUICKSTART, "qwen3_moe", seed=seed), dtype, seed) for seed in range(SEEDS)
        ]
    write(options.out, rows=rows)
    table = Table(title="Recorded experts")
    for name in ("model", "dtype", "seed", "choices that differ", "gap with", "mean", "gap without", "mean without"):
        table.add_column(name)
    for row in rows:
        gaps = [f"{row[name]:.1e}" for name in ("gap", "mean", "gap_without", "mean_without")]
        share = f"{row['differ']} of {row['choices']}"
        table.add_row(row["model"], row["dtype"], str(row["seed"]), share, *gaps)
    show([table], options.markdown)


def near_tie(seed: int) -> Any:
    """Return a random model of 3 layers with 8 experts in each, in which a token takes 1 expert."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    counts = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "num_hidden_layers": 3}
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=64, head_dim=8, initializer_range=0.1, norm_topk_prob=True, **sizes, **counts
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for _, _, router in routers(model):
        router.weight.data.normal_(0, 0.3)
        half = router.weight.data[:4]
        router.weight.data[4:] = half * (1 + 1e-7 * torch.randn(half.shape))
    return model


def measure(name: str, model: Any, dtype: str, seed: int) -> dict[str, Any]:
    """Return one row: gaps over 64 completions of 120 tokens, and the choices on which sampler and trainer differ."""
    model = adopt(model.to(getattr(torch, dtype)))
    if name == "quickstart":
        prompts = load_tokenizer(str(QUICKSTART))(["Qa1b4c0d2e0f3g3h3?", "Qa0b3c3d1e4f2g0h1?"])["input_ids"]
    else:
        prompts = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(seed)).tolist()
    compute_exactly(True)
    sampling = SamplingConfig(120, n=32, seed=seed, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy=CACHE).generate(prompts, sampling)
    compute_exactly(False)
    unrouted = [replace(r, trace=EvictionTrace(r.trace.evict_at)) for r in rollouts]
    with torch.no_grad():
        with_record, without = (gaps(replay_logprobs(model, sampled), rollouts) for sampled in (rollouts, unrouted))
        differ, choices = changed(model, rollouts)
    return {
        **{"model": name, "dtype": dtype, "seed": seed, "differ": differ, "choices": choices},
        **{"gap": float(with_record.max()), "mean": float(with_record.mean())},
        **{"gap_without": float(without.max()), "mean_without": float(without.mean())},
    }


def gaps(logprobs: Sequence[torch.Tensor], rollouts: Sequence[Rollout]) -> torch.Tensor:
    pairs = zip(logprobs, rollouts, strict=True)
    return torch.cat([(ours - torch.tensor(r.model_logprobs)).abs() for ours, r in pairs])


class Watching(RoutedView):
    """Replays the recorded experts, and keeps the routers' own choices: layer -> int64 [tokens, K]."""

    def route(self, layer: int, own: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.own = {**getattr(self, "own", {}), layer: own}
        return super().route(layer, own, logits)


def changed(model: Any, rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Return the number of (token, layer) pairs whose router, in a replay with the recorded experts before it, chooses
    another set of experts than the sampler's; and the number of all pairs.
    """
    differ = total = 0
    for r in rollouts:
        ids = torch.tensor([[*r.prompt_ids, *r.completion_ids]])
        view: Any = make_view([r.trace], [0], ids.shape[1], "cpu")
        watching = Watching(view.inner, view.routed, "cpu")
        model(input_ids=ids, attention_mask=NO_MASK, kv_view=watching, use_cache=False)
        for layer, chosen in watching.own.items():
            taken = r.trace.further["routed"][layer, :-1].long()
            differ += int((chosen[:-1].sort(-1).values != taken.sort(-1).values).any(-1).sum())
            total += len(taken)
    return differ, total


if __name__ == "__main__":
    main()
