"""Memory of head budgets: a head is padded to the longest head of its layer (hf) or of all layers (vLLM).

A model samples stories, which are the contexts. `sparse-rl budgets` measures head budgets on them, at two ratios; the
loss is that of continuations that the model samples with the full cache. The budgets are then turned into numbers of
entries of a context of TOKENS tokens.

    OMP_NUM_THREADS=1 python benchmarks/head_budgets.py MODEL     # writes benchmarks/results/head_budgets.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.one_shot import BEGINNINGS, BEHIND, CONTEXT
from benchmarks.results import Rows, over_seeds, write
from rollout import SamplingConfig, make_engine
from rollout.context import PromptCacheConfig
from rollout.context.budgets import counts, padding
from sparse_rl.commands.budgets import measure
from sparse_rl.recipe import BudgetsRecipe, make_recipe

RATIOS = (0.05, 0.2)
TOKENS = 8192  # of the context in which entries are counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory of a small model that tells stories")
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/head_budgets.json"))
    options = parser.parse_args()
    rows = [measured(options.model, options.contexts, ratio, seed) for ratio in RATIOS for seed in options.seeds]
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables(rows):
        console.print(table)
    write(options.out, contexts=options.contexts, tokens=TOKENS, rows=rows)


def measured(model: str, contexts: int, ratio: float, seed: int) -> dict[str, Any]:
    """Measure head budgets at a ratio. Returns a row of the results."""
    with tempfile.TemporaryDirectory() as folder:
        write_stories(Path(folder) / "stories.jsonl", model, contexts, seed)
        recipe = make_recipe(
            {
                "kind": "budgets", "model": model, "output_dir": f"{folder}/out", "dtype": "float32", "seed": seed,
                "tasks": {"stories": {"path": f"{folder}/stories.jsonl", "columns": {"context": "context"}}},
                "contexts": contexts, "questions": 1, "base": ratio, "temperature": 1.0,
                "top_p": 1.0, "max_completion_length": BEHIND,
            }
        ).expect(BudgetsRecipe)  # fmt: skip
        content = measure(recipe, progress=False)
    assert content is not None
    shares = torch.tensor(content["shares"], dtype=torch.float64)
    config = PromptCacheConfig(ratio=ratio, first=0)
    hf, vllm = padding(counts(shares, ratio, TOKENS, config))
    row = {"ratio": ratio, "seed": seed, "hf": hf, "vllm": vllm, "shares": content["shares"]}
    print(f"ratio {ratio:g}, seed {seed}: hf {hf:.2f}, vLLM {vllm:.2f}", flush=True)
    return row


def write_stories(file: Path, model: str, contexts: int, seed: int) -> None:
    """Sample stories of CONTEXT tokens, and write them with the beginnings of their continuations."""
    from transformers import AutoTokenizer

    engine, tokenizer = make_engine("hf", model=model, policy="full"), AutoTokenizer.from_pretrained(model)
    sampling = SamplingConfig(CONTEXT - 1, n=contexts, seed=seed, ignore_eos=True)
    rollouts = engine.generate([[tokenizer.bos_token_id]], sampling)
    texts = tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
    lines = [{"context": text, "prompt": f" {beginning}"} for text in texts for beginning in BEGINNINGS]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def tables(rows: Rows) -> list[Table]:
    """Return a table of the padded memory in units of the memory of the entries alone."""
    table = Table(title="memory with padding / memory of the entries, mean and standard error over seeds")
    for name in ("ratio", "hf", "vLLM"):
        table.add_column(name, justify="right")
    for ratio in dict.fromkeys(row["ratio"] for row in rows):
        chosen = [row for row in rows if row["ratio"] == ratio]
        cells = ["{:.2f} ± {:.2f}".format(*over_seeds([row[name] for row in chosen])) for name in ("hf", "vllm")]
        table.add_row(f"{ratio:g}", *cells)
    return [table]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
