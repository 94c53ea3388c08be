"""Caches of a model of stories without training, written to benchmarks/results/CASE.json.

    OMP_NUM_THREADS=1 STORIES=DIR python benchmarks/caches.py clustered_quality head_budgets     # --small tests them

DIR has stories260K of karpathy/tinyllamas in transformers' format: 5 layers, 8 query and 4 kv heads, head dim 8.

clustered_quality   KL(full cache || cache) per token, in nats, of tokens 160 to 500 of 16 texts that the model samples
                    with a full cache, decoded again under each cache. `read` counts the tokens of an opened page, but
                    not its summary, which is read only to choose the page; `held` counts all summaries
head_budgets        memory of a context of 8,192 tokens, over the memory of its entries alone, if heads are padded to
                    the longest head of their layer (hf) or of all layers (vLLM), by head budgets from ten stories
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from threading import Semaphore
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch

from benchmarks.contexts import BEGINNINGS
from benchmarks.entries_read import read_and_held
from benchmarks.results import Case, measure_cases
from benchmarks.training import command, token_divergences
from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.context.budgets import counts, padding
from sparse_rl.models.load import load_model
from trainer.batch import Example

MODEL = os.environ.get("STORIES", "")
PROMPT, FROM, LENGTH, TEXTS = 64, 160, 500, 16  # tokens; the queries FROM to LENGTH - 1 are compared
LINED, PAGED = (
    {"policy": "lined", "compression": 8, "window": 32, "sinks": 1, "period": 8},
    {"policy": "clustered", "page": 16, "window": 32, "sinks": 1, "open_pages": 2},
)
READS = {0: 59.5, 1: 74.5, 2: 89.5, 3: 104.5, 5: 134.5}  # open pages -> mean number of entries that PAGED reads


def layered(*parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a cache block for five layers. Its three parts have one, three and one layers."""
    return {"policy": "layered", "parts": [{"layers": n, "cache": c} for n, c in zip((1, 3, 1), parts, strict=True)]}


OWN = {"streaming": {"sinks": 1}, "h2o": {"sinks": 1, "window": 32}, "gkv": {"window": 16}}
CHANGES: list[dict[str, str]] = [
    {"compressor": "attention"}, {"compressor": "random"}, {"values": "zero"}, {"bias": "none"}, {"softmax": "nested"},
    {"compressor": "attention", "bias": "none", "softmax": "nested"},  # the paper's equations
]  # fmt: skip
CACHES: list[Mapping[str, Any]] = [
    *(
        {"policy": policy, "budget": int(read - 4.5), "period": 8, **own}
        for policy, own in OWN.items()
        for read in READS.values()
    ),
    *({**LINED, "compression": n} for n in (8, 4)),
    *({**PAGED, "open_pages": k} for k in (*READS, 30)),
    *({**PAGED, "open_pages": k, **change} for change in CHANGES for k in (0, 2)),
    layered(LINED, PAGED, LINED),
    layered(PAGED, LINED, PAGED),
]


@cache
def texts() -> tuple[Any, list[Example]]:
    model = load_model(MODEL).eval()
    start = model.config.bos_token_id
    sampling = SamplingConfig(max_tokens=LENGTH, n=TEXTS, seed=7, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy="full").generate([[start]], sampling)
    tokens = [[start, *rollout.completion_ids] for rollout in rollouts]
    return model, [Example(text[:PROMPT], text[PROMPT:]) for text in tokens]


def clustered_quality(block: Mapping[str, Any]) -> dict[str, float]:
    model, rows = texts()
    values = token_divergences(model, block, model, rows)
    kl = torch.stack([one[FROM + 1 - PROMPT :].mean() for one in values])  # a query's next token is judged
    read, held = (count.mean().item() for count in read_and_held(block, PROMPT, torch.arange(FROM, LENGTH)))
    return {"read": read, "held": held, "KL": float(kl.mean()), "error": float(kl.std() / len(kl) ** 0.5)}


def head_budgets(ratio: float, seed: int, contexts: int = 10) -> dict[str, float]:
    """Measure by `sparse-rl budgets`; the loss is that of continuations that the model samples with the full cache."""
    from transformers import AutoTokenizer

    engine, tokenizer = make_engine("hf", model=MODEL, policy="full"), AutoTokenizer.from_pretrained(MODEL)
    sampling = SamplingConfig(191, n=contexts, seed=seed, ignore_eos=True)
    rollouts = engine.generate([[tokenizer.bos_token_id]], sampling)
    stories = tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
    lines = [json.dumps({"context": text, "prompt": f" {begins}"}) for text in stories for begins in BEGINNINGS]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stories.jsonl").write_text("\n".join(lines))
        recipe = {
            "kind": "budgets", "model": MODEL, "output_dir": f"{folder}/out", "dtype": "float32", "seed": seed,
            "tasks": {"stories": {"path": f"{folder}/stories.jsonl", "columns": {"context": "context"}}},
            "contexts": contexts, "questions": 1, "base": ratio, "temperature": 1.0, "top_p": 1.0,
            "max_completion_length": 96,
        }  # fmt: skip
        Path(folder, "recipe.yaml").write_text(json.dumps(recipe))
        command(Path(folder, "out/head_budgets.json"), "budgets", f"{folder}/recipe.yaml", slots=Semaphore())
        shares = torch.tensor(json.loads(Path(folder, "out/head_budgets.json").read_text())["shares"]).double()
    hf, vllm = padding(counts(shares, ratio, 8192, PromptCacheConfig(ratio=ratio, first=0)))
    return {"hf": hf, "vLLM": vllm}


CASES = {
    "clustered_quality": Case(clustered_quality, ("cache",), [(one,) for one in CACHES]),
    "head_budgets": Case(
        head_budgets, ("ratio", "seed"), [(ratio, seed) for ratio in (0.05, 0.2) for seed in range(3)]
    ),
}

if __name__ == "__main__":
    measure_cases(CASES, __doc__)
