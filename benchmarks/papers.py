"""Every analysis of the papers once, on tiny models: `make papers` ends with a report that holds an example of each.

The quickstart's model samples under several policies; short trainings give learned policies and curves; a model that
looks up facts, trained by recipes/retrieval into FOLDER/retrieval, has contexts to compact. What is finished is kept:
a second call makes only what is missing.

    python benchmarks/papers.py [FOLDER]       # default: runs/papers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.training import command

MODEL = "model=quickstart/model"
CACHES = {  # folder of rollouts -> the cache that they are sampled under
    "full": "{policy: full}",
    **{name: f"{{policy: {name}, budget: 40, window: 4, period: 8}}" for name in ("gkv", "rkv", "snapkv", "morphkv")},
    "clustered": "{policy: clustered, page: 4, window: 8, sinks: 1, open_pages: 2}",
}
LEARNED = {  # training -> its cache
    "kvpop": "{policy: kvpop, sinks: 1, window: 20, budget: 40, scorer: mlstm}",
    "kvpop_immediate": "{policy: kvpop, sinks: 1, window: 20, budget: 40, scorer: {name: mlstm, readout: immediate}}",
    "dms": "{policy: dms, window: 8, compression: 2, scorer: mlp}",
}
FIGURES = {  # figure -> folders of rollouts
    "overlap": ["full"], "sparsity": ["full", "gkv"], "positions": ["gkv", "rkv", "snapkv", "morphkv"],
    "cloud": ["gkv"], "kept_text": ["gkv"], "kept_heads": ["kvpop"], "recall": ["kvpop"], "evict_ratio": ["dms"],
    "attention": ["clustered"],
}  # fmt: skip
SHORT = ["max_steps=60", "validation.every=20", "validation.problems=64"]
VALIDATION = "{data: {synthetic: {task: running_sum, size: 64, split: evaluation, seed: 2}}, problems: 64, every: 4}"
CONTEXTS = (
    "[{policy: full}, {policy: none}, {policy: am, select: attention, queries: [repeat], ratio: [0.05, 0.1, 0.2]}, "
    "{policy: evict, aggregate: mean, queries: [context], ratio: [0.05, 0.1, 0.2]}]"
)
Run = Callable[..., None]  # (file that the command leaves, words of the command)


def sample(folder: Path, run: Run) -> None:
    for name, cache in CACHES.items():
        words = ["rollout", "quickstart/grpo", MODEL, f"cache={cache}", "num_generations=2", "--problems", "8"]
        run(f"rollouts/{name}/rollouts.json", *words, "--out", f"{folder}/rollouts/{name}")
    words = ["eval", "quickstart/eval", MODEL, f"output_dir={folder}/eval", "tasks.running_sum.synthetic.size=128"]
    sweep = ["sweep.policy=[streaming, gkv, snapkv]", "sweep.cache={budget: [40, 56, 72], period: [8]}"]
    run("eval/eval.json", *words, *sweep, "--resume")


def train(folder: Path, run: Run) -> None:
    for name, cache in LEARNED.items():
        words = ["train", "quickstart/kvpop", *SHORT, f"cache={cache}", f"output_dir={folder}/{name}"]
        run(f"{name}/model/config.json", *words)
        words = ["rollout", "quickstart/eval", f"model={folder}/{name}", "cache=null", "--problems", "16"]
        if name != "kvpop_immediate":
            run(f"rollouts/{name}/rollouts.json", *words, "--out", f"{folder}/rollouts/{name}")
    for name, recipe in {"rl_sparse": "grpo", "rl_full": "grpo_full", "distill": "distill"}.items():
        words = ["train", f"quickstart/{recipe}", "max_steps=12", f"output_dir={folder}/{name}"]
        held_out = [] if name == "distill" else [f"validation={VALIDATION}"]
        run(f"{name}/model/config.json", *words, *held_out)


def compact(folder: Path, run: Run) -> None:
    """Ask 8 questions about each of 4 documents of facts."""
    from sparse_rl.data.synthetic import ASKED, Retrieval

    lines = []
    for row in Retrieval().rows("calibration", 4, 0, True):
        document, first = row["prompt"].split(f" {ASKED} ")
        words = (first + row["completion"]).split()
        for name, answer in zip(words[:16:2], words[1:17:2], strict=True):
            lines.append(json.dumps({"context": document, "prompt": name, "answers": [answer]}) + "\n")
    facts, model = folder / "facts.jsonl", folder / "retrieval"
    facts.parent.mkdir(parents=True, exist_ok=True)
    facts.write_text("".join(lines))
    for name, start in (("short", []), ("sft", [f"model={model}/short"])):
        words = ["train", f"retrieval/{name}", f"output_dir={model}/{name}", *start]
        run(f"retrieval/{name}/model/config.json", *words)
    task = f"tasks={{facts: {{path: {facts}, columns: {{context: context}}, prompt_template: ' asked: {{prompt}}'}}}}"
    shared = [f"model={model}/sft", task, "temperature=1.0", "top_p=1.0", "max_completion_length=8", "--resume"]
    words = ["budgets", "budgets/qwen3-4b", *shared, "dtype=float32", "contexts=4", "top_k=null"]
    queries = "prompt_cache={policy: am, select: attention, queries: [repeat]}"
    run("budgets/head_budgets.json", *words, f"output_dir={folder}/budgets", queries)
    words = ["eval", "quickstart/eval", *shared, "cache=null", "accuracy=short_answer", f"prompt_cache={CONTEXTS}"]
    run("contexts/eval.json", *words, f"output_dir={folder}/contexts")


def main(folder: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    slots = Semaphore(2)

    def run(made: str, *words: str) -> None:
        command(folder / made, *words, slots=slots)

    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(part, folder, run) for part in (compact, sample, train)]:
            job.result()
    for name, places in FIGURES.items():
        sources = [f"{folder}/rollouts/{place}" for place in places]
        run(f"figures/{name}.json", "plot", *sources, "--figure", name, "--out", f"{folder}/figures/{name}.png")
    subprocess.run([sys.executable, "-m", "sparse_rl.cli", "report", str(folder)], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/papers"))
