"""Every command refuses a prompt plus completion longer than the model's maximum length (its "context length"), here
1,024 tokens, before it loads the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from test_commands import error_of

from sparse_rl.commands.main import main
from sparse_rl.data import problems, tokens
from sparse_rl.data.tokens import prompt_ids
from sparse_rl.models import load

ENGINES = ("hf", "vllm")
PERPLEXITY = """
kind: perplexity
model: {model}
output_dir: {out}
dtype: float32
text: text.txt
prompt_tokens: 25
"""


@pytest.fixture(autouse=True)
def no_model_may_be_loaded(workdir: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make loading a model an error, and write the files that the tests use."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    (workdir / "perplexity.yaml").write_text(PERPLEXITY.format(model=model, out=workdir / "out"))
    (workdir / "text.txt").write_text("12 34 " * 1000)
    (workdir / "long.jsonl").write_text(json.dumps({"prompt": "1" * 1020, "answer": "1"}) + "\n")
    monkeypatch.setattr(load, "load_plain_model", refuse)
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # as in the command, if the library was not imported before
    yield
    if shown:
        datasets.enable_progress_bars()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "grpo.yaml", "--dry-run"], "max_completion_length"),
        (["train", "grpo.yaml"], "max_completion_length"),
        (["train", "distill.yaml", "completions=student"], "max_completion_length"),
        (["doctor", "grpo.yaml"], "max_completion_length"),
        (["doctor", "eval.yaml"], "max_completion_length"),
        (["rollout", "grpo.yaml"], "max_completion_length"),
        (["eval", "eval.yaml"], "max_completion_length"),
        (["perplexity", "perplexity.yaml"], "completion_tokens"),
        (["doctor", "perplexity.yaml"], "completion_tokens"),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_a_completion_as_long_as_the_models_context_length_is_refused(
    words: list[str], key: str, engine: str, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    output = error_of(capsys, *words, f"rollout.engine={engine}", f"{key}=1024")
    assert output.startswith(f"sparse-rl: error: {key}: 1,024 tokens, after a prompt of ")
    assert "exceed the model's context length of 1,024 tokens" in output
    assert not (workdir / "out/model").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bound_on_prompts_is_added_to_the_completion(
    engine: str, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    """With `max_prompt_tokens` 24, completions of 1,001 tokens are refused. Control: 1,000 are accepted."""
    words = ["train", "grpo.yaml", "--dry-run", f"rollout.engine={engine}", "data.max_prompt_tokens=24"]
    assert "after a prompt of up to 24, exceed" in error_of(capsys, *words, "max_completion_length=1001")
    assert main([*words, "max_completion_length=1000"]) == 0
    assert main(["doctor", *words[1:2], *words[3:], "max_completion_length=1000"]) == 0


def test_long_completions_of_a_dataset_are_accepted_by_hf_only(workdir: Path, capsys: pytest.CaptureFixture) -> None:
    """In distillation from a dataset, completions are cut to the model's length, so hf accepts any maximum. vLLM would
    have to reserve memory for that number of tokens, and refuses."""
    words = ["train", "distill.yaml", "--dry-run", "max_completion_length=1024", "data.max_prompt_tokens=24"]
    assert main([*words, "rollout.engine=hf"]) == 0
    capsys.readouterr()
    assert "1,024 tokens, after a prompt of up to 24" in error_of(capsys, *words, "rollout.engine=vllm")


def test_max_model_len_is_limited_by_the_models_context_length(workdir: Path, capsys: pytest.CaptureFixture) -> None:
    output = error_of(capsys, "train", "grpo.yaml", "--dry-run", "rollout.max_model_len=1025")
    assert "rollout.max_model_len: 1,025 exceeds the model's context length of 1,024 tokens" in output


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "grpo.yaml", "--dry-run", "num_generations=4"], "data"),
        (["train", "distill.yaml", "--dry-run", "completions=student", "max_completion_length=24"], "data"),
        (["rollout", "grpo.yaml"], "data"),
        (["eval", "eval.yaml"], "tasks.long"),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_without_a_bound_the_longest_prompt_of_the_data_is_checked(
    words: list[str], key: str, engine: str, workdir: Path, capsys: pytest.CaptureFixture
) -> None:
    """Without `max_prompt_tokens`, the first prompt that leaves too few tokens for a completion is named, and the error
    gives the bound to set."""
    data = "tasks={long: {path: long.jsonl}}" if "eval" in words else "data={path: long.jsonl}"
    output = error_of(capsys, *words, f"rollout.engine={engine}", data)
    completion = 20 if "eval" in words else 24
    assert output.startswith(f"sparse-rl: error: {key}: the prompt of problem 1 has 1,020 tokens")
    assert f"leaves {1024 - completion:,}" in output
    assert f"max_prompt_tokens: {1024 - completion}" in output


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "grpo.yaml", "--dry-run"], "data"),
        (["rollout", "grpo.yaml"], "data"),
        (["eval", "eval.yaml"], "tasks.long"),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_a_prompt_of_megabytes_is_not_tokenized(
    words: list[str], key: str, workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A prompt of megabytes is refused or dropped without being tokenized, since tokenizing it would take seconds."""
    (workdir / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("1" * 3_000_000, "12+"))
    )

    def tokenized(prompt: Any, *others: Any) -> list[int]:
        assert len(prompt) < 10_000, "a prompt of megabytes is tokenized"
        return prompt_ids(prompt, *others)

    for module in (tokens, problems):
        monkeypatch.setattr(module, "prompt_ids", tokenized)
    task = "tasks.long." if "eval" in words else "data."
    data = "tasks={long: {path: long.jsonl}}" if "eval" in words else "data={path: long.jsonl}"
    accuracy = ["accuracy=format"] if "eval" in words else ["rewards=[format]"]
    output = error_of(capsys, *words, *accuracy, data)
    assert output.startswith(f"sparse-rl: error: {key}: the prompt of problem 1 has at least ")
    if "--dry-run" in words:
        main([*words, *accuracy, data, f"{task}max_prompt_tokens=100", "num_generations=4"])
        assert "dropped 1 prompts" in capsys.readouterr().err
