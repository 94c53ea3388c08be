"""On a terminal, a command shows its stages while it runs, and at the end the same lines as in redirected output."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import environment, watched

SFT = ["quickstart/sft", "data.synthetic.size=64"]
GRPO = ["quickstart/grpo", "rollout.engine=hf", "per_device_train_batch_size=16", "max_completion_length=40"]
LAUNCHED = [*GRPO, "launch.processes=2", "launch.zero_stage=2", "per_device_train_batch_size=8", "save_steps=2"]
BAR = "[━╸╺]+"
NUMBER = re.compile(r"\d[\d.e+-]*")


def lines(words: list[str], folder: Path) -> list[str]:
    """Return the output without a terminal, including stderr."""
    command = [sys.executable, "-P", "-m", "sparse_rl.cli", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.run(command, cwd=folder, env=environment(), text=True, check=True, **streams)  # type: ignore[call-overload]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", process.stdout), process.stdout
    return process.stdout.splitlines()


def without_numbers(written: list[str]) -> list[str]:
    """Return the lines with each number replaced by N."""
    return [NUMBER.sub("N", line).rstrip() for line in written if line.strip()]


def wrapped(written: list[str], columns: int = 100) -> list[str]:
    """Return the lines as a terminal wraps them."""
    return [line[start : start + columns] for line in written for start in range(0, len(line), columns)]


@pytest.mark.slow
@pytest.mark.parametrize("words", [SFT, GRPO, LAUNCHED], ids=["sft", "grpo", "launched"])
def test_a_terminal_shows_the_stages_of_a_training(words, tmp_path):
    status, screens = watched(["train", *words, "max_steps=3", "output_dir=run"], tmp_path)
    assert status == 0, screens[-1][1]
    rows = "\n".join(line for _, screen in screens for line in screen if line)
    assert re.search(rf"^loading the libraries {BAR} +\d:\d\d:\d\d$", rows, re.M)
    assert re.search(rf"^loading .*quickstart/model {BAR} +\d:\d\d:\d\d$", rows, re.M)
    assert re.search(rf"^training {BAR} 0/3 steps", rows, re.M)
    assert re.search(rf"^training {BAR} [12]/3 steps +\d:\d\d:\d\d [-\d]+:[-\d]+$", rows, re.M)
    assert re.search(rf"^saving the final model {BAR}", rows, re.M)
    if words is not SFT:
        assert re.search(rf"^sampling {BAR} \d+/16 sequences|^sampling {BAR} \d+/8 sequences", rows, re.M)
    if words is LAUNCHED:
        assert re.search(rf"^saving checkpoint-2 {BAR}", rows, re.M)
    first_time = screens[0][0]
    training_time = next(time for time, screen in screens if any(line.startswith("training ") for line in screen))
    assert first_time < training_time / 4  # long before the libraries are imported
    (second_folder := tmp_path / "again").mkdir()
    redirected = lines(["train", *words, "max_steps=3", "output_dir=run"], second_folder)
    assert without_numbers(screens[-1][1]) == without_numbers(wrapped(redirected))


@pytest.mark.slow
def test_a_short_training_prints_its_loss_without_a_terminal(tmp_path):
    output = lines(["train", *SFT, "max_steps=3", "output_dir=run"], tmp_path)
    assert re.fullmatch(r"3 steps in \d+ s  loss \d\.\d{4}", output[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stages"),
    [
        (["eval", "quickstart/eval", "tasks.running_sum.synthetic.size=8"], ["evaluating", "sampling"]),
        (["rollout", "quickstart/eval", "--problems", "8"], ["rollouts", "sampling"]),
        (["perplexity", "eval/pg19", "text=book.txt", "prompt_tokens=8", "completion_tokens=40", "pieces=4"],
         ["measuring", "decoding"]),
    ],
    ids=lambda value: value[0],
)  # fmt: skip
def test_a_terminal_shows_the_stages_of_eval_rollout_and_perplexity(words, stages, tmp_path):
    (tmp_path / "book.txt").write_text("1 2 3 4 5 6 7 8 9 0 " * 60)
    words = [*words, "model=quickstart/model", "rollout.engine=hf", "output_dir=run"]
    words += ["cache={policy: streaming, budget: 24}", "sweep={}"] if words[0] == "perplexity" else []
    status, screens = watched(words, tmp_path)
    assert status == 0, screens[-1][1]
    rows = "\n".join(line for _, screen in screens for line in screen if line)
    for stage in ["loading the libraries", "loading .*quickstart/model"]:
        assert re.search(rf"^{stage} {BAR} +\d:\d\d:\d\d$", rows, re.M)
    for stage in stages:
        assert re.search(rf"^{stage} +{BAR} \d+/\d+ (problem|piece|sequence)s? +\d:\d\d", rows, re.M)
    assert not any(re.search(BAR + " ", line) for line in screens[-1][1] if not line.startswith(("┏", "┡", "├", "└")))
    assert lines([*words, "--overwrite"], tmp_path)
