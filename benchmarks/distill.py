"""The cost of a distillation step with a teacher in memory (whole vocabulary or top k), and with a teacher cache.

The student's forward pass costs 1, and its backward pass 2. A teacher with t times the student's parameters adds t.
Reading k log-probs per token adds almost nothing. The evictions are simulated before the timing.

    OMP_NUM_THREADS=1 python benchmarks/distill.py      # writes benchmarks/results/distill.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.results import write
from rollout import make_engine
from trainer.distill.trainer import DistillArguments, DistillTrainer
from trainer.examples import Example
from trainer.losses.config import DistillationLossConfig
from trainer.teacher.cache import TeacherCache, TeacherFacts, weights_fingerprint, write_teacher_cache

VOCAB, ROWS, PROMPT, LENGTH, TOP = 4096, 8, 32, 512, 256
STUDENT = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
TEACHER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8}
CACHE = {"policy": "gkv", "budget": 64, "window": 16, "period": 32}


def build(sizes: dict[str, int]) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **heads, **sizes))


def body(model: Any) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distill.json"))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    student, teacher = build(STUDENT), build(TEACHER)
    rows = [Example(*(torch.randint(VOCAB, (n,)).tolist() for n in (PROMPT, LENGTH))) for _ in range(ROWS)]
    seconds: dict[str, list[float]] = {"teacher": [], f"teacher, top {TOP}": [], f"teacher cache, top {TOP}": []}
    with tempfile.TemporaryDirectory() as folder:
        facts = TeacherFacts("-", weights_fingerprint(teacher), VOCAB, 1.0, TOP, "float16")
        write_teacher_cache(folder, teacher, rows, facts)
        engine = make_engine("hf", model=student, policy=CACHE)
        rollouts = engine.simulate([r.prompt for r in rows], [r.completion for r in rows])
        examples = [Example.from_rollout(rollout) for rollout in rollouts]
        trainers = []
        for name in seconds:
            args = DistillArguments(
                output_dir=folder, use_cpu=not torch.cuda.is_available(), report_to=[], disable_tqdm=True,
                gradient_checkpointing=False, loss=DistillationLossConfig(top_k=None if name == "teacher" else TOP),
            )  # fmt: skip
            source: Any = TeacherCache(folder) if "cache" in name else teacher
            trainers.append((name, DistillTrainer(student, source, engine, args, rows)))
        for run in range(options.runs + 1):
            for name, trainer in trainers:
                start = time.perf_counter()
                trainer.compute_loss(trainer.model, examples).backward()
                if run:  # the first is a warm-up
                    seconds[name].append(time.perf_counter() - start)
    base = seconds["teacher"]
    timed_rows = [
        {
            "teacher": name,
            "seconds": statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(base, times, strict=True)),
            "runs": times,
        }
        for name, times in seconds.items()
    ]
    shape = {"vocabulary": VOCAB, "rows": ROWS, "tokens": LENGTH, "student": body(student), "teacher": body(teacher)}
    write(options.out, shape=shape, rows=timed_rows)
    times = body(teacher) / body(student)
    table = Table(title=f"Loss and gradients of {ROWS} x {LENGTH} tokens, a teacher of {times:.1f} x the student")
    for column in ("teacher", "seconds", "times faster"):
        table.add_column(column, justify="left" if column == "teacher" else "right")
    for row in timed_rows:
        table.add_row(row["teacher"], f"{row['seconds']:.2f}", f"{row['ratio']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
