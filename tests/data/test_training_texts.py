"""`training_texts` turns the files of Nemotron-Math v2 and Longmino into rows of at most a number of tokens. What is
left out is counted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from sparse_rl.data.config import DataConfig
from sparse_rl.data.convert import main
from sparse_rl.data.problems import load_data
from sparse_rl.data.tokens import completion_ids, prompt_ids

CHAT = "{% for message in messages %}user {{ message['content'] }} {% endfor %}assistant "


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer whose tokens are words with the space after them, in tmp_path/model."""
    words = Tokenizer(WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = Split(Regex(r"\S+\s*"), "isolated")
    result = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", chat_template=CHAT, model_max_length=100
    )
    result.save_pretrained(tmp_path / "model")
    return result


def conversation(words: int, **changes: Any) -> dict[str, Any]:
    """Return a row of Nemotron-Math v2 whose answer has the number of words."""
    assistant = {"role": "assistant", "reasoning_content": "so it is", "content": "a " * words + "."}
    messages = [{"role": "user", "content": "what is x"}, assistant | changes.pop("assistant", {})]
    return {"problem": "x", "expected_answer": "1", "messages": messages, "tools": [], **changes}


def rows_of(capsys: pytest.CaptureFixture, *words: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows that the program prints, and its last line."""
    assert main(words) == 0
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err.splitlines()[-1]


def written(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_conversations_of_nemotron_become_rows_up_to_a_length(tmp_path, tokenizer, capsys):
    turns = [*conversation(1)["messages"], *conversation(1)["messages"]]
    file = written(
        tmp_path / "high.jsonl",
        conversation(4),
        conversation(5),
        conversation(1, tools=[{"name": "python"}]),
        conversation(1, messages=turns),
        conversation(1, assistant={"reasoning_content": None}),
        conversation(1, messages=[{"role": "system", "content": "be brief"}, *conversation(1)["messages"]]),
    )
    completion = "<think>\nso it is\n</think>\n\na a a a ."
    chat = [{"role": "user", "content": "what is x"}]
    tokens = len(prompt_ids(chat, tokenizer)) + len(completion_ids(completion, tokenizer))
    rows, summary = rows_of(capsys, "nemotron", file, "--model", str(tmp_path / "model"), "--tokens", str(tokens))
    assert rows[0] == {"prompt": "what is x", "completion": completion}
    assert [row["completion"].count("a ") for row in rows] == [4, 1]
    assert summary == (
        f"2 rows, 1 longer than {tokens} tokens left out, 2 with tools or several turns left out, "
        "1 without reasoning_content left out"
    )
    loaded = load_data(
        DataConfig(path=written(tmp_path / "rows.jsonl", *rows)), tokenizer, require=("prompt", "completion")
    )
    assert len(loaded) == 2


def test_texts_of_longmino_are_cut_into_pieces(tmp_path, tokenizer, capsys, monkeypatch):
    """The pieces contain the text, apart from spaces between pieces, and none is longer than `--tokens`."""
    texts = ["a1 b2\n c3 d4 e5 f6 g7", "h8 i9"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    rows, summary = rows_of(capsys, "longmino", "-", "--model", str(tmp_path / "model"), "--tokens", "5")
    assert rows == [
        {"prompt": "a1", "completion": " b2\n c3 "},
        {"prompt": "d4", "completion": " e5 f6 "},
        {"prompt": "h8", "completion": " i9"},
    ]
    assert summary == "3 rows, 1 of a single word left out"
    for row in rows:
        assert len(prompt_ids(row["prompt"], tokenizer)) + len(completion_ids(row["completion"], tokenizer)) <= 5
