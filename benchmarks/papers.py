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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = "model=quickstart/model"
SLOTS = 2  # commands that run at a time
CACHES = {  # folder of rollouts -> the cache that they are sampled under
    "full": "{policy: full}",
    "gkv": "{policy: gkv, budget: 40, window: 4, period: 8}",
    "rkv": "{policy: rkv, budget: 40, window: 4, period: 8}",
    "snapkv": "{policy: snapkv, budget: 40, window: 4, period: 8}",
    "morphkv": "{policy: morphkv, budget: 40, window: 4, period: 8}",
    "clustered": "{policy: clustered, page: 4, window: 8, sinks: 1, open_pages: 2}",
}
SHORT = ["max_steps=60", "validation.every=20", "validation.problems=64"]
KVPOP = {  # training -> its cache
    "kvpop": "{policy: kvpop, sinks: 1, window: 20, budget: 40, scorer: mlstm}",
    "kvpop_immediate": "{policy: kvpop, sinks: 1, window: 20, budget: 40, scorer: {name: mlstm, readout: immediate}}",
    "dms": "{policy: dms, window: 8, compression: 2, scorer: mlp}",
}
FIGURES = {  # figure -> (folders of rollouts, further arguments)
    "overlap": (["full"], []),
    "sparsity": (["full", "gkv"], []),
    "positions": (["gkv", "rkv", "snapkv", "morphkv"], []),
    "cloud": (["gkv"], []),
    "kept_text": (["gkv"], []),
    "kept_heads": (["kvpop"], []),
    "recall": (["kvpop"], []),
    "evict_ratio": (["dms"], []),
    "attention": (["clustered"], []),
}
VALIDATION = "{data: {synthetic: {task: running_sum, size: 64, split: evaluation, seed: 2}}, problems: 64, every: 4}"
CONTEXTS = (
    "[{policy: full}, {policy: none}, {policy: am, select: attention, queries: [repeat], ratio: [0.05, 0.1, 0.2]}, "
    "{policy: evict, aggregate: mean, queries: [context], ratio: [0.05, 0.1, 0.2]}]"
)


@dataclass
class Step:
    """One command. made : the file that it leaves, by which a later call knows that it is finished"""

    name: str
    made: Path
    words: list[str]
    before: list[Step] = field(default_factory=list)  # steps whose files it reads


def steps(folder: Path) -> list[Step]:
    """Return all steps; each comes after the steps that it needs."""
    made: list[Step] = []

    def step(name: str, place: str, *words: str, before: Sequence[Step] = ()) -> Step:
        made.append(Step(name, folder / place, list(words), list(before)))
        return made[-1]

    def out(name: str) -> str:
        return f"output_dir={folder / name}"

    first = step(
        "retrieval, first stage",
        "retrieval/short/model/config.json",
        "train",
        "retrieval/short",
        out("retrieval/short"),
    )
    sampled: dict[str, Step] = {}
    for name, cache in CACHES.items():
        words = ["rollout", "quickstart/grpo", MODEL, f"cache={cache}", "num_generations=2", "--problems", "8"]
        place = f"rollouts/{name}"
        sampled[name] = step(f"rollouts under {name}", f"{place}/rollouts.json", *words, "--out", str(folder / place))
    for name, cache in KVPOP.items():
        words = ["train", "quickstart/kvpop", *SHORT, f"cache={cache}", out(name)]
        trained = step(f"training of {name}", f"{name}/model/config.json", *words)
        if name == "kvpop_immediate":
            continue
        place, words = f"rollouts/{name}", ["rollout", "quickstart/eval", f"model={folder / name}", "cache=null"]
        command = [*words, "--problems", "16", "--out", str(folder / place)]
        sampled[name] = step(f"rollouts under {name}", f"{place}/rollouts.json", *command, before=[trained])
    for name, recipe in {"rl_sparse": "grpo", "rl_full": "grpo_full", "distill": "distill"}.items():
        words = ["train", f"quickstart/{recipe}", "max_steps=12", out(name)]
        held_out = [] if name == "distill" else [f"validation={VALIDATION}"]
        step(f"training of {name}", f"{name}/model/config.json", *words, *held_out)
    words = ["eval", "quickstart/eval", MODEL, out("eval"), "tasks.running_sum.synthetic.size=128", "--resume"]
    sweep = ["sweep.policy=[streaming, gkv, snapkv]", "sweep.cache={budget: [40, 56, 72], period: [8]}"]
    step("accuracy against budget", "eval/eval.json", *words, *sweep)
    words = ["train", "retrieval/sft", out("retrieval/sft"), f"model={folder / 'retrieval/short'}"]
    facts = step("retrieval, second stage", "retrieval/sft/model/config.json", *words, before=[first])
    asked = folder / "facts.jsonl"
    task = f"{{facts: {{path: {asked}, columns: {{context: context}}, prompt_template: ' asked: {{prompt}}'}}}}"
    shared = [
        f"model={folder / 'retrieval/sft'}",
        f"tasks={task}",
        "temperature=1.0",
        "top_p=1.0",
        "max_completion_length=8",
    ]
    words = [
        "budgets",
        "budgets/qwen3-4b",
        *shared,
        "dtype=float32",
        "contexts=4",
        "top_k=null",
        out("budgets"),
        "--resume",
    ]
    step(
        "head budgets",
        "budgets/head_budgets.json",
        *words,
        "prompt_cache={policy: am, select: attention, queries: [repeat]}",
        before=[facts],
    )
    words = ["eval", "quickstart/eval", *shared, out("contexts"), "cache=null", "accuracy=short_answer", "--resume"]
    step("compacted contexts", "contexts/eval.json", *words, f"prompt_cache={CONTEXTS}", before=[facts])
    for name, (places, more) in FIGURES.items():
        sources = [str(folder / "rollouts" / place) for place in places]
        picture = folder / "figures" / f"{name}.png"
        words = ["plot", *sources, "--figure", name, *more, "--out", str(picture)]
        step(f"figure {name}", f"figures/{name}.json", *words, before=[sampled[place] for place in places])
    return made


def write_facts(file: Path) -> None:
    """Write questions about documents of the retrieval task, 8 for each of 4 documents, as JSON lines."""
    from sparse_rl.data.retrieval import ASKED, Retrieval, rows

    lines = []
    for row in rows("calibration", 4, 0, True, Retrieval()):
        document, first = row["prompt"].split(f" {ASKED} ")
        words = (first + row["completion"]).split()
        for name, answer in zip(words[:16:2], words[1:17:2], strict=True):
            lines.append(json.dumps({"context": document, "prompt": name, "answers": [answer]}) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines))


def perform(step: Step, say: Callable[[str], None]) -> None:
    """Run one command, unless its file exists. Raises SystemExit with the last line of its output if it fails."""
    if step.made.exists():
        return
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "sparse_rl.cli", *step.words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise SystemExit(f"{step.name} failed: {lines[-1] if lines else 'no output'}")
    say(f"{step.name}: {time.monotonic() - start:.0f} s")


def main(folder: Path) -> None:
    sys.path[0] = str(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = time.monotonic()
    write_facts(folder / "facts.jsonl")
    with ThreadPoolExecutor(SLOTS) as pool:
        jobs = {}
        for step in steps(folder):
            needed = [jobs[id(one)] for one in step.before]
            jobs[id(step)] = pool.submit(
                lambda step=step, needed=needed: ([job.result() for job in needed], perform(step, print))
            )
        for job in jobs.values():
            job.result()
    subprocess.run([sys.executable, "-m", "sparse_rl.cli", "report", str(folder)], check=True)
    print(f"{(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/papers"))
