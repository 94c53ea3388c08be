"""Before it loads the model, every command refuses a prompt plus completion longer than the model's maximum length (its
"context length"), here 1,024 tokens, and names a row that the model's chat template refuses.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import pytest
from test_commands import error_of

from sparse_rl.commands.main import main
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
def no_model_may_be_loaded(workdir, model, monkeypatch):
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
def test_a_completion_as_long_as_the_models_context_length_is_refused(words, key, engine, workdir, capsys):
    output = error_of(capsys, *words, f"rollout.engine={engine}", f"{key}=1024")
    assert output.startswith(f"sparse-rl: error: {key}: 1,024 tokens, after a prompt of ")
    assert "exceed the model's context length of 1,024 tokens" in output
    assert not (workdir / "out/model").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bound_on_prompts_is_added_to_the_completion(engine, workdir, capsys):
    words = ["train", "grpo.yaml", "--dry-run", f"rollout.engine={engine}", "data.max_prompt_tokens=24"]
    assert "after a prompt of up to 24, exceed" in error_of(capsys, *words, "max_completion_length=1001")
    assert main([*words, "max_completion_length=1000"]) == 0
    assert main(["doctor", *words[1:2], *words[3:], "max_completion_length=1000"]) == 0


def test_long_completions_of_a_dataset_are_accepted_by_hf_only(workdir, capsys):
    """hf cuts completions to the model's length; vLLM would have to reserve memory for the maximum."""
    words = ["train", "distill.yaml", "--dry-run", "max_completion_length=1024", "data.max_prompt_tokens=24"]
    assert main([*words, "rollout.engine=hf"]) == 0
    capsys.readouterr()
    assert "1,024 tokens, after a prompt of up to 24" in error_of(capsys, *words, "rollout.engine=vllm")


def test_max_model_len_is_limited_by_the_models_context_length(workdir, capsys):
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
def test_without_a_bound_the_longest_prompt_of_the_data_is_checked(words, key, engine, workdir, capsys):
    data = "tasks={long: {path: long.jsonl}}" if "eval" in words else "data={path: long.jsonl}"
    output = error_of(capsys, *words, f"rollout.engine={engine}", data)
    completion = 20 if "eval" in words else 24
    assert output.startswith(f"sparse-rl: error: {key}: row 1: the prompt has 1,020 tokens")
    assert f"leaves {1024 - completion:,}" in output
    assert f"max_prompt_tokens: {1024 - completion}" in output


ALTERNATE = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}Q{{ m.content }};{% endfor %}A"
)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "grpo.yaml"],
        ["train", "distill.yaml"],
        ["train", "distill.yaml", "completions=student", "max_completion_length=24"],
        ["train", "sft.yaml"],
        ["rollout", "grpo.yaml", "--problems", "17"],
        ["eval", "eval.yaml"],
    ],
    ids=" ".join,
)
def test_a_late_row_that_the_chat_template_refuses_is_named(words, workdir, model, monkeypatch, capsys):
    shutil.copytree(model, "chat")
    Path("chat/chat_template.jinja").write_text(ALTERNATE)
    user = {"role": "user", "content": "1+2"}
    good = {"prompt": [user], "answer": "3", "completion": "3"}
    rows = [*[good] * 16, {**good, "prompt": [user, user]}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(load, "load_plain_model", lambda *_, **__: pytest.fail("a model is loaded"))
    key = "tasks.rows" if "eval" in words else "data"
    data = "{path: rows.jsonl}" if key == "data" else "{rows: {path: rows.jsonl}}"
    words = [*words, "model=chat", f"{key.partition('.')[0]}={data}"]
    expected = f"sparse-rl: error: {key}: row 17: the tokenizer refuses the prompt: roles must alternate"
    assert error_of(capsys, *words) == expected
    assert error_of(capsys, *words, "--dry-run") == expected
    assert main([*words, "--dry-run", f"{key}.limit=16"]) == 0
