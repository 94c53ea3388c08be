"""Speed, memory and stage times on made-up shapes, measured by `sparse-rl bench`.

Each question is a recipe of kind bench with random weights; runs/timing/NAME has its runs.

hf            the reference engine, 4 layers
equal_memory  vLLM with blocks for 4 sequences without evictions, and 32 sequences: how many can be sampled at a time?
equal_batch   vLLM with blocks for all 32 sequences. On a CPU with a tiny model the fixed cost of a step dominates
layers        vLLM, 3 layers of Qwen2.5-0.5B's shape: the share of compactions in a real model's step
clustered     parts of a decode step with clustered attention, one layer, at 4,096 and 8,192 tokens
contexts      stages of the compaction of a context, one layer of Qwen2.5-0.5B's shape

    OMP_NUM_THREADS=1 python benchmarks/timing.py     # writes benchmarks/results/timing.json; a second call continues
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.results import Rows, show, with_rows_before, write
from sparse_rl.models.directory import model_directory
from sparse_rl.recipe import BenchRecipe, make_recipe

FOUR_LAYERS = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
TWELVE_LAYERS = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
OF_HALF_B = {
    "vocab_size": 512, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 65_536,
}  # fmt: skip
SMALL = {"budget": 128, "period": 128}
GKV = {"policy": "gkv", "window": 16}
KVPOP = {"policy": "kvpop", "budget": 256, "window": 64}  # budget: the peak of the others
VLLM: dict[str, Any] = {"engine": "vllm", "exact": False}
IN_VLLM: dict[str, Any] = {"rollout": VLLM, "batch": [32], "prompt_tokens": 48, "plain_vllm": True}
QWEN3, QWEN2 = "quickstart/model", "Qwen/Qwen2.5-1.5B-Instruct"  # families of the shapes

QUESTIONS: dict[str, dict[str, Any]] = {
    "hf": {
        "model": QWEN3, "shape": FOUR_LAYERS, "batch": [8], "prompt_tokens": 16, "length": [2064], "repetitions": 5,
        "sweep": {"policy": [
            {**GKV, "budget": 512, "period": 128, "redundancy": False}, {**GKV, "budget": 512, "period": 128},
            {"policy": "am", "window": 16, "budget": 512, "period": 128},
            {"policy": "streaming", "budget": 512, "period": 128},
        ]},
    },
    "equal_memory": {
        "model": QWEN3, "shape": TWELVE_LAYERS, **IN_VLLM, "length": [2048],
        "rollout": {**VLLM, "kv_cache_gb": (4 * 64 + 1) * 32 * 2 * 12 * 64 * 4 / 2**30},
        "sweep": {"policy": ["streaming", {**GKV, "redundancy": False}, GKV], "cache": SMALL},
    },
    "equal_batch": {
        "model": QWEN3, "shape": TWELVE_LAYERS, **IN_VLLM, "length": [1048],
        "sweep": {"policy": [
            {"policy": "streaming", **SMALL}, {**GKV, "redundancy": False, **SMALL}, {**GKV, **SMALL},
            {**GKV, "redundancy": False, "budget": 128, "period": 1}, {"policy": "h2o", **SMALL},
            {"policy": "am", "window": 16, "reference_queries": 128, **SMALL},
            {**KVPOP, "scorer": {"name": "mlp"}}, {**KVPOP, "scorer": {"name": "mlstm"}},
            {**KVPOP, "scorer": {"name": "mlstm", "readout": "immediate"}},
        ]},
    },
    "layers": {
        "model": QWEN2, "shape": {**OF_HALF_B, "num_hidden_layers": 3}, **IN_VLLM, "length": [548],
        "sweep": {"policy": [
            {"policy": "streaming", **SMALL}, {**GKV, "redundancy": False, **SMALL}, {**GKV, **SMALL},
            {**GKV, "redundancy": False, "budget": 128, "period": 1},
            {"policy": "am", "window": 16, "reference_queries": 128, **SMALL},
            {**KVPOP, "scorer": {"name": "mlp"}}, {**KVPOP, "scorer": {"name": "mlstm"}},
        ]},
    },
    **{
        f"clustered_{tokens}": {
            "model": QWEN3, "shape": {**TWELVE_LAYERS, "num_hidden_layers": 1, "num_attention_heads": 4,
                                      "num_key_value_heads": 2, "max_position_embeddings": 65_536},
            "batch": [1], "prompt_tokens": tokens, "length": [tokens + 64], "parts": True,
            "sweep": {"policy": [{"policy": "clustered", "page": 16, "window": 128, "sinks": 4, "open_pages": 3}]},
        }
        for tokens in (4096, 8192)
    },
    "contexts": {
        "model": QWEN2, "shape": {**OF_HALF_B, "num_hidden_layers": 1}, "length": [],
        "contexts": {"length": [8192, 16_384, 32_768], "compactions": [
            {"queries": ["repeat"], "ratio": [0.05], "chunk": 4096, "most_queries": 2048},
        ]},
    },
}  # fmt: skip


def recipe_of(name: str, runs: Path, repetitions: int | None) -> BenchRecipe:
    """Return the recipe of a question."""
    own = {"kind": "bench", "output_dir": str(runs / name), "dtype": "float32", "random_weights": True}
    more = {} if repetitions is None else {"repetitions": repetitions}
    engine = {"rollout": {"engine": "hf"}}
    recipe = make_recipe({**engine, **own, **QUESTIONS[name], **more}).expect(BenchRecipe)
    return recipe.with_models(model_directory)


def measured(name: str, recipe: BenchRecipe) -> tuple[Rows, dict[str, Any]]:
    """Measure a question. Returns its rows for the file of results, and the content of its bench.json."""
    from sparse_rl.commands.bench import measure
    from sparse_rl.commands.bench_points import prepare_benches

    content = measure(recipe, prepare_benches(recipe), resume=Path(recipe.output_dir).is_dir())
    rows = [*content["rows"], *content["contexts"]]
    model = QUESTIONS[name]["model"]  # in place of the path of its directory on this machine
    return [{"question": name, "place": place, **row, "model": model} for place, row in enumerate(rows)], content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--repetitions", type=int, help="default: 3, hf 5")
    parser.add_argument("--runs", type=Path, default=Path("runs/timing"))
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/timing.json"))
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from sparse_rl.analysis.timing import timing_tables

    new: Rows = []
    for name in options.questions:
        rows, content = measured(name, recipe_of(name, options.runs, options.repetitions))
        new += rows
        merged = with_rows_before(options.out, {}, new, lambda row: (row["question"], row["place"]))
        write(options.out, settings={}, rows=merged)
        show(timing_tables(content), options.markdown)


if __name__ == "__main__":
    main()
