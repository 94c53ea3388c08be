"""Clustered attention without training: its divergence from a full cache, against the entries read and held.

A model samples texts with a full cache. These texts are decoded again under each cache, teacher-forced. The columns are
explained in docs/benchmarks.md. `read` counts the tokens of an opened page, but not its summary, which is read only to
choose the page; `held` counts all summaries. `to streaming` is the KL minus the KL of streaming that reads as much.

    OMP_NUM_THREADS=1 python benchmarks/clustered_quality.py MODEL    # writes benchmarks/results/clustered_quality.json

Our model is karpathy/tinyllamas' stories260K in transformers' format: 5 layers, 8 query and 4 kv heads, head dim 8.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.entries_read import read_and_held
from benchmarks.results import write
from rollout.config import SamplingConfig
from rollout.hf import HFEngine
from sparse_rl.policies import make_policy

TEXTS, PROMPT, FROM, LENGTH = 16, 64, 160, 500  # tokens; the queries FROM to LENGTH - 1 are compared
FULL = {"policy": "full"}
PERIOD = 8
LINED = {"policy": "lined", "compression": 8, "window": 32, "sinks": 1, "period": PERIOD}
PAGED = {"policy": "clustered", "page": 16, "window": 32, "sinks": 1, "open_pages": 2}
READS = {0: 59.5, 1: 74.5, 2: 89.5, 3: 104.5, 5: 134.5}  # open pages -> mean number of entries that PAGED reads


def caches() -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for policy, own in (("streaming", {"sinks": 1}), ("h2o", {"sinks": 1, "window": 32}), ("gkv", {"window": 16})):
        for read in READS.values():
            budget = int(read - (PERIOD + 1) / 2)
            rows[f"{policy}, budget {budget}"] = {"policy": policy, "budget": budget, "period": PERIOD, **own}
    rows |= {f"lined, 1/{n}": {**LINED, "compression": n} for n in (8, 4)}
    rows |= {f"clustered, {k} open": {**PAGED, "open_pages": k} for k in (*READS, 30)}
    for name, change in {
        "compressor attention": {"compressor": "attention"},
        "compressor random": {"compressor": "random"},
        "values zero": {"values": "zero"},
        "bias none": {"bias": "none"},
        "softmax nested": {"softmax": "nested"},
        "the paper's equations": {"compressor": "attention", "bias": "none", "softmax": "nested"},
    }.items():
        rows |= {f"clustered, {k} open, {name}": {**PAGED, "open_pages": k, **change} for k in (0, 2)}
    return rows | {
        "lined in the first and last layer, else 2 open": layered(LINED, PAGED, LINED),
        "2 open in the first and last layer, else lined": layered(PAGED, LINED, PAGED),
    }


def layered(*parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a cache block for five layers. Its three parts have one, three and one layers."""
    return {"policy": "layered", "parts": [{"layers": n, "cache": c} for n, c in zip((1, 3, 1), parts, strict=True)]}


@torch.no_grad()
def decoded(model: str, cache: Mapping[str, Any], texts: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the next token at each position >= FROM, float32 [B, LENGTH - FROM, V].

    texts : int64 [B, LENGTH + 1]
    """
    engine = HFEngine(model, make_policy(cache), device=texts.device)
    held, logprobs = engine.prefill(texts[:, :PROMPT].tolist()).cache, []
    for query in range(PROMPT, LENGTH):
        held.begin_decode([True] * len(texts), texts.device)
        position = torch.full((len(texts), 1), query, device=texts.device)
        hidden = engine._hidden(texts[:, query : query + 1], position, held)
        if query >= FROM:
            logprobs.append(engine._logits(hidden[:, 0]).log_softmax(-1))
    return torch.stack(logprobs, dim=1)


def own_texts(model: str, seed: int, device: str) -> torch.Tensor:
    """Return texts that the model samples with a full cache, int64 [TEXTS, LENGTH + 1]."""
    engine = HFEngine(model, make_policy(FULL), device=device)
    start = engine.model.config.bos_token_id
    sampling = SamplingConfig(max_tokens=LENGTH, n=TEXTS, seed=seed, ignore_eos=True)
    rollouts = engine.generate([[start]], sampling)
    return torch.tensor([[start, *rollout.completion_ids] for rollout in rollouts], device=device)


def measured(model: str, texts: torch.Tensor) -> list[dict[str, Any]]:
    full, rows, by_text = decoded(model, FULL, texts), [], []
    follows = texts[:, FROM + 1 :, None]
    for name, cache in {"full": FULL, **caches()}.items():
        logprobs = decoded(model, cache, texts)
        kl = (full.exp() * (full - logprobs)).sum(-1).mean(1).double()  # [B]
        by_text.append(kl)
        nll = (full - logprobs).gather(-1, follows).mean().item()
        read, held = (count.mean().item() for count in read_and_held(cache, PROMPT, torch.arange(FROM, LENGTH)))
        row = {"cache": name, "read": read, "held": held, "kl": kl.mean().item(), "kl_error": error(kl), "nll": nll}
        rows.append({**row, "block": cache})
        print(f"{name}: KL {row['kl']:.4f}", flush=True)
    for row, kl in zip(rows, by_text, strict=True):
        for other, its in zip(rows, by_text, strict=True):
            if other["block"]["policy"] == "streaming" and abs(other["read"] - row["read"]) < 1 and other is not row:
                row |= {"to_streaming": (kl - its).mean().item(), "to_streaming_error": error(kl - its)}
    return rows


def error(values: torch.Tensor) -> float:
    """Return the standard error of the mean."""
    return values.std().item() / len(values) ** 0.5


def table(rows: list[dict[str, Any]]) -> Table:
    rendered = Table(title="Decoding a model's own text under several caches")
    for name in ("cache", "read", "held", "KL", "nll", "to streaming"):
        rendered.add_column(name, justify="left" if name == "cache" else "right")
    for row in rows:
        kl = f"{row['kl']:.4f} ± {row['kl_error']:.4f}"
        over = f"{row['to_streaming']:+.4f} ± {row['to_streaming_error']:.4f}" if "to_streaming" in row else ""
        rendered.add_row(row["cache"], f"{row['read']:.1f}", f"{row['held']:.1f}", kl, f"{row['nll']:+.4f}", over)
    return rendered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory of the model")
    parser.add_argument("--seed", type=int, default=7, help="seed of the texts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/clustered_quality.json"))
    options = parser.parse_args()
    rows = measured(options.model, own_texts(options.model, options.seed, options.device))
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    settings = {"seed": options.seed, "texts": TEXTS, "prompt": PROMPT, "from": FROM, "length": LENGTH}
    write(options.out, settings=settings, rows=rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
