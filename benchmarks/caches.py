"""Caches of a model of stories without training, written to benchmarks/results/CASE.json.

    OMP_NUM_THREADS=1 STORIES=DIR python benchmarks/caches.py clustered_quality head_budgets     # --small tests them

DIR has stories260K of karpathy/tinyllamas in transformers' format: 5 layers, 8 query and 4 kv heads, head dim 8.

clustered_quality   KL(full cache || cache) per token, in nats, of tokens 160 to 500 of 16 texts that the model samples
                    with a full cache, decoded again under each cache. `read` counts the tokens of an opened page, but
                    not its summary, which is read only to choose the page; `held` counts all summaries
scored_stories      KL as above, of policies that score entries, over 8 texts of each of three seeds
scored_sums         accuracy of the quickstart's model on 256 problems of each of three seeds, sampled under the same
                    policies. triattention has centres measured on a text of the model's own, of another seed; on one
                    of the texts themselves (`same`), or on random tokens (`random`)
head_budgets        memory of a context of 8,192 tokens, over the memory of its entries alone, if heads are padded to
                    the longest head of their layer (hf) or of all layers (vLLM), by head budgets from ten stories
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
from sparse_rl.data.synthetic import RunningSum, grade
from sparse_rl.methods.triattention.config import ATTACHED_AS
from sparse_rl.methods.triattention.policy import measure_centres
from sparse_rl.models.directory import model_directory
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


SCORED = [
    *({"policy": policy, "window": 16, "period": 8} for policy in ("triattention", "snapkv", "rkv", "gkv")),
    {"policy": "streaming", "sinks": 1, "period": 8},
]
OTHERS = [(SCORED[0], "same"), (SCORED[0], "random"), ({**SCORED[0], "horizon": 128}, "other")]
SEEDS = 3


@cache
def stories_of(seed: int, count: int) -> tuple[Any, list[list[int]]]:
    model = load_model(MODEL).eval()
    start = model.config.bos_token_id
    sampling = SamplingConfig(max_tokens=LENGTH, n=count, seed=seed, ignore_eos=True)
    rollouts = make_engine("hf", model=model, policy="full").generate([[start]], sampling)
    return model, [[start, *rollout.completion_ids] for rollout in rollouts]


@cache
def sums_of(split: str, seeds: int, size: int) -> tuple[Any, Any, list[list[int]], list[str]]:
    """Return the quickstart's model, its tokenizer, and the prompts and answers of problems, seed after seed."""
    model, tokenizer = load_model(model_directory("quickstart/model")).eval(), RunningSum.tokenizer()
    rows = [row for seed in range(seeds) for row in RunningSum().rows(split, size, seed)]
    return model, tokenizer, [tokenizer.encode(row["prompt"]) for row in rows], [row["answer"] for row in rows]


def calibrated(model: Any, text: list[int], calibration: str) -> Any:
    if calibration == "random":
        generator = torch.Generator().manual_seed(0)
        text = torch.randint(3, model.config.vocab_size, (len(text),), generator=generator).tolist()
    setattr(model, ATTACHED_AS, measure_centres(model, text[: model.config.max_position_embeddings]))
    return model


def by_seed(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the values of each seed, which come seed after seed, and the mean and its standard error."""
    means = torch.tensor(values).view(SEEDS, -1).double().mean(1)
    seeds = {f"{name}, seed {seed}": float(mean) for seed, mean in enumerate(means)}
    return {**seeds, name: float(means.mean()), "error": float(means.std() / SEEDS**0.5)}


def scored_stories(cache: Mapping[str, Any], calibration: str, budget: int) -> dict[str, float]:
    read = [stories_of(seed, 8) for seed in range(SEEDS)]
    model, tokens = read[0][0], [text for _, texts in read for text in texts]
    model = calibrated(model, tokens[0] if calibration == "same" else stories_of(100, 1)[1][0], calibration)
    rows = [Example(one[:PROMPT], one[PROMPT:]) for one in tokens]
    values = token_divergences(model, {**cache, "budget": budget}, model, rows)
    return by_seed("KL", [float(one[FROM + 1 - PROMPT :].mean()) for one in values])


def scored_sums(cache: Mapping[str, Any], calibration: str, budget: int) -> dict[str, float]:
    model, tokenizer, prompts, answers = sums_of("evaluation", SEEDS, 256)
    sampling = SamplingConfig(max_tokens=152, seed=0, stop_token_ids=(tokenizer.eos_token_id,))
    asked = prompts[:16] if calibration == "same" else sums_of("calibration", 1, 16)[2]
    full = make_engine("hf", model=model, policy="full").generate(asked, sampling)
    text = [token for r in full for token in (*r.prompt_ids, *r.completion_ids)]
    policy = {**cache, "budget": budget}
    engine = make_engine("hf", model=calibrated(model, text, calibration), policy=policy, max_batch=256)
    texts = tokenizer.batch_decode([r.completion_ids for r in engine.generate(prompts, sampling)], True)
    return by_seed("accuracy", [float(grade(*pair)) for pair in zip(texts, answers, strict=True)])


def scored(small: int, large: int) -> list[tuple[Mapping[str, Any], str, int]]:
    own = [(cache, "other", budget) for budget in (small, large) for cache in SCORED]
    return [*own, *((cache, calibration, small) for cache, calibration in OTHERS)]


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
    "scored_stories": Case(scored_stories, ("cache", "calibration", "budget"), scored(55, 85)),
    "scored_sums": Case(scored_sums, ("cache", "calibration", "budget"), scored(40, 56)),
    "head_budgets": Case(
        head_budgets, ("ratio", "seed"), [(ratio, seed) for ratio in (0.05, 0.2) for seed in range(3)]
    ),
}

if __name__ == "__main__":
    measure_cases(CASES, __doc__)
