"""The README is short, its links are valid, and its commands work in the order given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sparse_rl.recipe.load import load_recipe, make_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = "runs/my-run"

# Overrides that replace models and data from the hub, and shorten the run.
SHORT_TRAINING = [
    "model=quickstart/model", "data={synthetic: {task: running_sum, size: 64}}", "rewards=[boxed]", "dtype=float32",
    "rollout.engine=hf", "per_device_train_batch_size=4", "gradient_accumulation_steps=1", "num_generations=2",
    "max_completion_length=24", "validation=null", "max_steps=2", "save_steps=1",
]  # fmt: skip
SHORT_DISTILLATION = [
    "model=quickstart/model", "data={synthetic: {task: running_sum, size: 64}}", "keep=null", "dtype=float32",
    "rollout={engine: hf}", "per_device_train_batch_size=4", "gradient_accumulation_steps=1", "max_steps=2",
    "launch.processes=1", "launch.zero_stage=0", "cache.budget=40", "report_to=[]", "output_dir=runs/distill",
]  # fmt: skip
# Beginning of a command in the README -> overrides with which the test runs it; None means that another test runs it.
OVERRIDES = {
    "make quickstart": [sys.executable, "-m", "sparse_rl.cli", "quickstart"],
    "sparse-rl doctor qwen2.5-1.5b/grpo": SHORT_TRAINING,
    "sparse-rl bench qwen2.5-1.5b/grpo": [
        "model=quickstart/model", "dtype=float32", "rollout.engine=hf", "repetitions=1", "batch=[2]", "prompt_tokens=8",
        "length=[24]",
    ],
    "sparse-rl train qwen2.5-1.5b/grpo": SHORT_TRAINING,
    "sparse-rl eval eval/math500": [
        "tasks={sums: {synthetic: {task: running_sum, size: 8, split: evaluation}}}", "accuracy=boxed", "samples=1",
        "dtype=float32", "rollout.engine=hf", "max_completion_length=24",
    ],
    "sparse-rl train quickstart/distill": ["max_steps=2", "validation=null", "rollout.engine=hf"],
    "sparse-rl train deepseek-r1-distill-qwen-7b/distill": SHORT_DISTILLATION,
    "sparse-rl train RECIPE --resume": [],
    "sparse-rl serve": None,  # tests/vllm_engine/test_serve.py
    "sparse-rl plot": [],
    "sparse-rl report": [],
    "sparse-rl perplexity eval/pg19": [
        "model=quickstart/model", "dtype=float32", "rollout.engine=hf", "prompt_tokens=16", "completion_tokens=16",
        "sweep.cache.fraction=[0.5]",
    ],
    "sparse-rl budgets budgets/qwen3-4b": [
        "model=quickstart/model", "dtype=float32", "tasks={a: {path: articles.jsonl, columns: {context: context}}}",
        "contexts=1", "ratios=[0, 0.05, 1]", "max_completion_length=4",
    ],
    "sparse-rl rollout RECIPE": [],
}  # fmt: skip


def commands() -> list[str]:
    """Return the README's commands in the README's order, without their comments."""
    lines = re.findall(r"^    ((?:sparse-rl|make quickstart).*)$", README, re.M)
    words = [" ".join(line.split("#")[0].split()) for line in lines]
    return list(dict.fromkeys(words))


def test_readme_has_at_most_1300_words():
    assert len(README.split()) <= 1300


def test_every_link_leads_to_a_file():
    links = {page: re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")) for page in PAGES}
    assert sum(map(len, links.values())) > 10
    missing = [
        f"{page.name}: {link}" for page, result in links.items() for link in result if not (page.parent / link).exists()
    ]
    assert not missing


def test_every_command_of_the_readme_is_in_the_table_of_overrides():
    beginnings = [word for word in OVERRIDES if any(command.startswith(word) for command in commands())]
    assert beginnings == list(OVERRIDES), "a command that the README no longer names"
    unknown = [command for command in commands() if not any(command.startswith(word) for word in OVERRIDES)]
    assert not unknown


def test_the_recipe_in_the_readme_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    assert make_recipe(yaml.safe_load(text), ["rewards=[math]"]).cache.budget == 128


def test_recipes_in_the_docs_are_valid(tmp_path):
    results = [
        (page, text)
        for page in PAGES
        for text in re.findall(r"```yaml\n(kind: .*?)```", page.read_text(encoding="utf-8"), re.S)
        if "output_dir:" in text  # without it the block is only part of a recipe
    ]
    assert len(results) >= 5
    for page, text in results:
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        other_rewards = ["rewards=[math]"] if "rewards:" in text else []  # a user's own function is in another block
        assert load_recipe(tmp_path / "recipe.yaml", other_rewards).kind in text, page.name


@pytest.mark.slow
def test_commands_work_in_the_readmes_order(tmp_path):
    recipe = "kind: grpo\n" + "\n".join(word.replace("=", ": ", 1) for word in SHORT_TRAINING)
    recipe += f"\noutput_dir: {RUN}\ncache: {{policy: streaming, budget: 40}}\ngradient_checkpointing: false\n"
    (tmp_path / "mine.yaml").write_text(recipe.replace("rollout.engine: hf", "rollout: {engine: hf}"))
    (tmp_path / "book.txt").write_text("Qa1b2c3?a1A1;b2A1B3;" * 10)
    (tmp_path / "articles.jsonl").write_text(json.dumps({"context": "Qa1b2c3?a1A1;" * 3, "prompt": "Qa?"}) + "\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(words: list[str]) -> None:
        process = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, f"{' '.join(words)}\n{process.stdout[-1000:]}\n{process.stderr[-2000:]}"

    program = [sys.executable, "-m", "sparse_rl.cli"]
    for command in commands():
        beginning, overrides = next(
            (word, overrides) for word, overrides in OVERRIDES.items() if command.startswith(word)
        )
        if overrides is None:
            continue
        if command.startswith("make"):
            run(overrides)
            continue
        if beginning == "sparse-rl train RECIPE --resume":  # only a stopped run is resumed
            run([*program, "train", "mine.yaml", "max_steps=1"])
        words = [word.replace("RECIPE", "mine.yaml") for word in command.split()[1:]]
        if beginning == "sparse-rl train RECIPE --resume":
            words.append("max_steps=2")
        run([*program, *words, *overrides])
    for written in ("runs/quickstart/results.json", f"{RUN}/model/config.json", f"{RUN}/plots/learning.png"):
        assert (tmp_path / written).is_file(), written
    assert {path.name for path in (tmp_path / RUN).glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
