"""Rows are what their source says: no type is guessed, no key is added, and a row that cannot be used is named."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest

from rewards import make_rewards
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.source import Number, table
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.data.tokens import completion_ids, prompt_ids
from sparse_rl.errors import UserError
from sparse_rl.recipe.run import check_golds

CALLS = (  # as in Llama 3.1's template, a message with tool_calls has exactly one
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call a message') }}{% endif %}C{{ m.tool_calls | tojson }}{% endif %}"
    "{{ {'user': 'Q', 'assistant': 'A', 'tool': 'T'}[m.role] }}{{ m.content | default('?') }};{% endfor %}A"
)
PARTS = CALLS.replace(  # a template that reads parts
    "{{ m.content | default('?') }}",
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
)
ALTERNATE = (
    "{% for m in messages %}{% if m.role == 'user' and loop.index0 > 0 and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}Q{{ m.content }};{% endfor %}A"
)
USER = {"role": "user", "content": "a"}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
CHATS = {  # prompts whose messages have different keys
    "plain": [USER],
    "call": [USER, {**CALL, "content": ""}, {"role": "tool", "content": "3", "tool_call_id": "1"}, USER],
    "no content": [USER, CALL, {"role": "tool", "content": "3"}, USER],
    "name": [{**USER, "name": "2020-05-03"}],
    "objects": [
        USER,
        {
            "role": "assistant",
            "content": "b",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "2"}}}],
        },
        USER,
    ],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def with_template(template: str | None) -> Any:
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def load(tmp_path: Path, text: str | bytes, suffix: str = ".jsonl", tokenizer: Any = None, **keys: Any) -> Any:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    require = ("prompt", "completion") if "completion" in keys.get("columns", ()) else ("prompt",)
    return load_data(DataConfig(path=str(path), **keys), tokenizer, require=require)


TEXTS = ["2020-05-03", "2020-05-03T10:00:00Z", "12:30", "null", "true", "NaN", "NA", "007", "1e5", "0.10", " a ", "-0"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".jsonl.gz", ".csv.gz"])
def test_text_stays_text(suffix, tmp_path):
    """Each text alone in its file, since one text that is no date hides a guess."""
    for text in TEXTS:
        rows = [{"prompt": text, "answer": text, "id": text}] * 2
        table = "prompt,answer,id\n" + f'{text},"{text}",{text}\n' * 2
        content = {".json": json.dumps(rows, indent=1), ".csv": table}.get(suffix.removesuffix(".gz"), lines(*rows))
        data = load(tmp_path, gzip.compress(content.encode(), mtime=0) if suffix.endswith(".gz") else content, suffix)
        assert list(data) == rows


@pytest.mark.parametrize(
    ("written", "gold"),
    [("12345678901234567891", None), ("-12345678901234567891234", None), ("0.10", None), ("1e5", None), ("1E400", None),
     ("3.14159265358979323846264338", None), ("5", None), ("5.0", None), ('"0.10"', "0.10"), ('"5"', "5")],
)  # fmt: skip
@pytest.mark.parametrize("other", ["", '{"prompt": "b", "answer": "x"}\n', '{"prompt": "b", "answer": 1}\n'])
def test_a_gold_keeps_the_digits_of_the_file(written, gold, other, tmp_path):
    data = load(tmp_path, f'{{"prompt": "a", "answer": {written}}}\n{other}')
    assert data["answer"][0] == (gold or written)
    assert len(data) == 1 + bool(other)


VALUES: list[Any] = [
    1, "1", 1.5, True, None, 2**70, [1, "2", None], [], [[]], {}, {"a": None}, {"a": [{"b": 2**65}, {"c": "2020-05"}]},
    "2020-01-01", [1, 2.5], {"x": "é", "y": "\u2028"},
]  # fmt: skip


def test_a_column_holds_any_values_exactly():
    for column in [*map(list, itertools.pairwise(VALUES)), *([a] for a in VALUES), VALUES]:
        assert json.dumps(table({"x": column})["x"][:]) == json.dumps(column)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_other_columns_are_passed_on_exactly(suffix, tmp_path):
    rows = [{"prompt": "a", "x": value} for value in VALUES]
    data = load(tmp_path, lines(*rows) if suffix == ".jsonl" else json.dumps(rows), suffix)
    data.save_to_disk(str(tmp_path / "saved"))
    for copy in (data, datasets.load_from_disk(str(tmp_path / "saved")), pickle.loads(pickle.dumps(data))):
        assert json.dumps(copy["x"][:]) == json.dumps(VALUES)
        assert json.dumps([row["x"] for row in copy]) == json.dumps(VALUES)


def test_a_number_shows_its_digits_and_computes():
    number = pickle.loads(pickle.dumps(Number("0.10")))
    assert (str(number), f"{number}", json.dumps(number), number + 1) == ("0.10", "0.10", "0.1", 1.1)


@pytest.mark.parametrize(
    ("feature", "value", "gold"),
    [("float32", 0.1, "0.1"), ("float64", 0.1, "0.1"), ("int64", 2**60 + 1, str(2**60 + 1)), ("string", "007", "007"),
     ("decimal128(5, 2)", Decimal("0.10"), "0.10")],
)  # fmt: skip
def test_golds_of_parquet_have_the_digits_of_their_type(feature, value, gold, tmp_path):
    features = datasets.Features({"prompt": datasets.Value("string"), "answer": datasets.Value(feature)})
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict({"prompt": ["a"], "answer": [value]}, features=features).to_parquet(path)
    assert load_data(DataConfig(path=str(path)))["answer"][:] == [gold]


def test_a_folder_of_json_is_read_like_its_files(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_text(
        lines({"prompt": "2020-05-03", "answer": 2**64}, {"prompt": "a", "answer": 1})
    )
    (tmp_path / "set/test.jsonl").write_text(lines({"prompt": "2021-05-03", "answer": 2}))
    read = {split: list(load_data(DataConfig(path=str(tmp_path / "set"), split=split))) for split in ("train", "test")}
    assert read["train"] == [{"prompt": "2020-05-03", "answer": str(2**64)}, {"prompt": "a", "answer": "1"}]
    assert read["test"] == [{"prompt": "2021-05-03", "answer": "2"}]
    mixed = load_data(DataConfig(path=str(tmp_path / "set"), split="train[1:]+test"))
    assert mixed["prompt"][:] == ["a", "2021-05-03"]


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ('{"prompt": "a"}\n5\n', ".jsonl", "row 2 is not a JSON object"),
        ('[{"prompt": "a"},\n{"prompt": "b"\n]', ".json", "line 3 is not JSON: Expecting ',' delimiter at column 1"),
        ('{"prompt": "a", "answer": ' + "1" * 5000 + "}", ".jsonl", "line 1: Exceeds the limit (4300 digits)"),
        ('{"prompt": "a", "answer": NaN}', ".jsonl", "row 1: it has no 'answer'"),
        ('{"prompt": "a\\ud83d"}', ".jsonl", "line 1 has one half of a surrogate pair"),
        ("{}\n", ".jsonl", "has no rows"),
        ("prompt,answer\na,b\nc,d,e\n", ".csv", "line 3 has more fields than the 2 columns"),
        ('prompt,answer\n"a,b\n', ".csv", "line 2 is not CSV"),
        ("prompt,prompt\na,b\n", ".csv", "two columns are called 'prompt'"),
        (b"prompt\na\n\xff\n", ".csv", "line 3 is not UTF-8"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], ".jsonl.gz", "cannot be read: Compressed file ended"),
    ],
)
def test_damaged_files_are_refused_in_one_line(text, suffix, message, tmp_path):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text, suffix)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", [b'\xef\xbb\xbf{"prompt": "a"}\r\n', b'\n{"prompt":\n"a"}', b'{"prompt": "\\ud83d\\ude00"}']
)
def test_unusual_files_are_read(text, tmp_path):
    assert load(tmp_path, text)["prompt"][0] in ("a", "\U0001f600")


def test_conditions_compare_the_text_of_a_csv_file_with_numbers(tmp_path):
    text = "prompt,level\na,3\nb,5\nc,\n"
    for where, prompts in (({"level": 3}, ["a"]), ({"level": {"from": 4}}, ["b"]), ({"level": ["5"]}, ["b"])):
        assert load(tmp_path, text, ".csv", where=where)["prompt"][:] == prompts


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".parquet", "hub"])
def test_a_chat_renders_as_in_a_file_of_its_own(kind, tmp_path, monkeypatch):
    tokenizer = with_template(CALLS)
    rows = [{"prompt": chat} for name, chat in CHATS.items() if kind.startswith(".json") or name != "objects"]
    if kind == "hub":
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
        data = load_data(DataConfig(path="org/name"), tokenizer)
    elif kind == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        data = load_data(DataConfig(path=str(tmp_path / "rows.parquet")), tokenizer)
    else:
        data = load(tmp_path, lines(*rows) if kind == ".jsonl" else json.dumps(rows), kind, tokenizer)
    assert data["prompt"][:] == [row["prompt"] for row in rows]
    for row, prompt in zip(rows, data["prompt"], strict=True):
        assert prompt_ids(prompt, tokenizer) == prompt_ids(
            load(tmp_path, lines(row), tokenizer=tokenizer)["prompt"][0], tokenizer
        )
    with_null = [{**USER, "tool_calls": None}]  # as other libraries write an absent key
    assert load(tmp_path, lines({"prompt": with_null}), tokenizer=tokenizer)["prompt"][:] == [[USER]]


@pytest.mark.parametrize(("template", "between"), [(CALLS, "\n"), (PARTS, "")])
def test_parts_of_text_are_joined_as_a_server_joins_them(template, between, tmp_path):
    tokenizer = with_template(template)
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "completion": [{"role": "assistant", "content": parts[:1]}]}
    ]
    data = load(tmp_path, lines(*rows), tokenizer=tokenizer, columns={"completion": "completion"})
    assert data["prompt"][0] == [{"role": "user", "content": between.join("abc")}]
    assert completion_ids(data["completion"][0], tokenizer) == completion_ids("a", tokenizer)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ({"role": "user", "content": None}, "must be text, or parts of text, got null"),
        ({**CALL, "content": None}, "must be text, or parts of text, got null"),
        ({"role": "user"}, "must be text, or parts of text, got null"),
        ({"role": "user", "content": 5}, "must be text, or parts of text, got 5"),
        ({"role": "user", "content": {"text": "a"}}, "must be text, or parts of text, got"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "must be text, or parts of text, got"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "must be text, or parts of text, got"),
        ({"role": "user", "content": [{"text": "a"}]}, "must be text, or parts of text, got"),
        ("a", "neither text nor a list of {role, content}"),
        ({"content": "a"}, "neither text nor a list of {role, content}"),
    ],
)
@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_a_message_without_text_is_refused(message, wrong, column, tmp_path):
    good = {"prompt": [USER], "completion": [{"role": "assistant", "content": "b"}]}
    columns = {"completion": "completion"}
    with pytest.raises(UserError) as caught:
        load(tmp_path, lines(good, {**good, column: [message]}), tokenizer=with_template(CALLS), columns=columns)
    assert f"data.columns.{column}: row 2" in str(caught.value)
    assert wrong in str(caught.value) or (column == "completion" and "expected text" in str(caught.value))


def test_an_empty_completion_is_refused(tmp_path):
    for content in ("", [{"type": "text", "text": ""}]):
        row = {"prompt": [USER], "completion": [{"role": "assistant", "content": content}]}
        with pytest.raises(UserError, match=r"data.columns.completion: row 1: the completion is empty"):
            load(tmp_path, lines(row), tokenizer=with_template(CALLS), columns={"completion": "completion"})


def test_every_prompt_is_rendered_and_a_bad_row_is_named_or_dropped(tmp_path, caplog):
    tokenizer = with_template(ALTERNATE)
    good, bad = {"prompt": [USER], "id": 1}, {"prompt": [USER, USER], "id": 2}
    rows = [good, {**good, "id": 3}, bad, {"prompt": None, "id": 4}, {**good, "id": 5}]
    message = "data: row 3: the tokenizer refuses the prompt: roles must alternate"
    with pytest.raises(UserError, match=message):
        load(tmp_path, lines(*rows), tokenizer=tokenizer)
    with pytest.raises(UserError, match=message):  # rows are counted in the file, also after conditions
        load(tmp_path, lines(*rows), tokenizer=tokenizer, where={"id": [2, 5]}, shuffle_seed=1)
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, lines(*rows), tokenizer=tokenizer, on_bad_row="drop")
    assert data["id"][:] == [1, 3, 5]
    assert "dropped 2 rows that cannot be used, kept 3: row 3: the tokenizer refuses the prompt" in caplog.text
    assert len(load(tmp_path, lines(*rows), tokenizer=tokenizer, limit=2)) == 2  # control: rows that are not used
    with pytest.raises(UserError, match="row 1: the tokenizer refuses the prompt"):
        load(tmp_path, lines(bad), tokenizer=tokenizer, on_bad_row="drop")


def test_a_conversation_that_the_template_refuses_with_its_completion_is_named(tmp_path):
    rows = [{"prompt": [USER], "completion": [{"role": role, "content": "b"}]} for role in ("assistant", "user")]
    with pytest.raises(UserError, match="row 2: the tokenizer refuses the prompt: roles must alternate"):
        load(tmp_path, lines(*rows), tokenizer=with_template(ALTERNATE), columns={"completion": "completion"})


def test_keys_without_effect_are_named(tmp_path, caplog):
    row, reads = lines({"prompt": "a"}), CALLS + "{% if enable_thinking is defined and enable_thinking %}T{% endif %}"
    for thinking in (True, False):
        load(tmp_path, row, tokenizer=with_template(reads), thinking=thinking)
    load(tmp_path, row, tokenizer=with_template(CALLS))
    assert caplog.text == ""  # control
    load(tmp_path, row, tokenizer=with_template(CALLS), thinking=False)
    assert "thinking has no effect, because the chat template ignores enable_thinking" in caplog.text
    load(tmp_path, row, subset="main")
    assert "the subset main has no effect" in caplog.text


@pytest.mark.parametrize(
    ("reward", "column", "good", "bad"),
    [
        ("letter", "answer", "C", "seven"),
        ("boxed", "answer", "7", r"\boxed{7"),
        ("code", "tests", ["assert f() == 1"], "?"),
    ],
)
def test_golds_that_a_reward_cannot_read_are_named(reward, column, good, bad, capsys):
    """They are named and counted, and refused if there are no others. A reward without golds is not called."""
    functions, _ = make_rewards([reward, "format"])
    check_golds(functions, table({"prompt": ["a"] * 3, column: [good] * 3}), "data")
    assert capsys.readouterr().err == ""  # control
    check_golds(functions, table({"prompt": ["a"] * 600, column: [good] * 598 + [bad, good]}), "data")
    count = (
        f"data: the reward {reward} cannot read {column} of 1 of 600 rows, whose completions it never scores; row 599: "
    )
    assert count in capsys.readouterr().err
    with pytest.raises(UserError, match=f"data: the reward {reward} cannot read {column} of 2 of 2 rows.*; row 1: "):
        check_golds(functions, table({"prompt": ["a"] * 2, column: [bad] * 2}), "data")
    with pytest.raises(UserError, match=f"data: the '{reward}' reward needs a column '{column}'"):
        check_golds(functions, table({"prompt": ["a"]}), "data")
