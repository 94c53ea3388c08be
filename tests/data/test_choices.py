"""Multiple-choice questions whose options are columns: options follow the question in an order that depends only on the
seed and on the question's text, and the answer is the letter of the right option. A mistake gives one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest

from rewards import make_rewards
from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.errors import UserError

COLUMNS = {"prompt": "Question"}
CHOICES = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]


def question(number: int, **replaced: Any) -> dict[str, Any]:
    """Return a row in the form of GPQA, with some columns replaced."""
    options = {column: f" {column} of {number}\n" for column in CHOICES}
    return {"Question": f"Question {number}?", **options, "Subdomain": "Optics", **replaced}


def data_of(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any = None, **keys: Any) -> Any:
    """Return the dataset of a data block whose file has these rows. The block names GPQA's columns by default."""
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = {"columns": COLUMNS, "choices": CHOICES, **keys}
    return load_data(DataConfig(path=str(file), **block), tokenizer, require=("prompt", "answer"))


def answers_of(data: Any) -> dict[str, tuple[str, str]]:
    """Return question -> (lines of its options, letter of the right option)."""
    prompts = (prompt.partition("\n\n") for prompt in data["prompt"])
    return {text: (lines, letter) for (text, _, lines), letter in zip(prompts, data["answer"], strict=True)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_options_follow_the_question_and_the_answer_is_the_right_letter(tmp_path):
    data = data_of(tmp_path, [question(i) for i in range(50)])
    assert data.column_names == ["prompt", "answer", "Subdomain"]
    (letter,), _ = make_rewards(["letter"])
    (boxed,), _ = make_rewards(["boxed"])
    for number, row in enumerate(data):
        text, empty, *lines = row["prompt"].split("\n")
        assert (text, empty) == (f"Question {number}?", "")
        assert [line[:3] for line in lines] == ["A) ", "B) ", "C) ", "D) "]
        assert {line[3:] for line in lines} == {f"{column} of {number}" for column in CHOICES}
        assert f"{row['answer']}) Correct Answer of {number}" in lines
        texts = [rf"So \boxed{{{line[0]}}}" for line in lines]
        right = [float("Correct" in line.split() and "Incorrect" not in line) for line in lines]
        assert letter(texts, answer=[row["answer"]] * 4) == right
        assert boxed(texts, answer=[row["answer"]] * 4) == right
        assert sum(right) == 1


def test_the_order_depends_on_the_seed_and_the_question_alone(tmp_path):
    rows = [question(i) for i in range(60)]
    expected = answers_of(data_of(tmp_path, rows))
    assert answers_of(data_of(tmp_path, rows)) == expected
    assert answers_of(data_of(tmp_path, rows[::-1])) == expected
    assert answers_of(data_of(tmp_path, rows, shuffle_seed=3)) == expected
    for kept in (data_of(tmp_path, rows, limit=7), data_of(tmp_path, rows[20:30]), data_of(tmp_path, rows[9:10])):
        assert answers_of(kept).items() <= expected.items()
    reworded = [{**row, "Incorrect Answer 2": "none"} for row in rows]
    letters = {text: letter for text, (_, letter) in expected.items()}
    assert {text: letter for text, (_, letter) in answers_of(data_of(tmp_path, reworded)).items()} == letters
    for seed in (1, 2):  # control
        other = answers_of(data_of(tmp_path, rows, choices_seed=seed))
        assert answers_of(data_of(tmp_path, rows, choices_seed=seed)) == other
        assert sum(other[text][0] != lines for text, (lines, _) in expected.items()) > 25
    assert len(set(letters.values())) == 4


def test_the_order_is_the_same_in_every_process_and_version(tmp_path):
    """These letters were computed once; a change would change the results of evaluations."""
    assert "".join(data_of(tmp_path, [question(i) for i in range(12)])["answer"]) == "CCCDBCCDCAAC"
    assert "".join(data_of(tmp_path, [question(i) for i in range(12)], choices_seed=7)["answer"]) == "DDDCCCBADDDC"


@pytest.mark.parametrize("count", [2, 4, 10, 26])
def test_right_letters_and_orders_are_uniform(count, tmp_path):
    """Within five standard deviations. Control: the dataset's own order, where the right option is always A, is not."""
    columns = [f"option {number}" for number in range(count)]
    rows = [{"prompt": f"{i}", **{column: column for column in columns}} for i in range(2600)]
    data = data_of(tmp_path, rows, columns={}, choices=columns)
    mean = len(rows) / count
    allowed = 5 * (mean * (1 - 1 / count)) ** 0.5
    lines = [prompt.split("\n")[2:] for prompt in data["prompt"]]
    last = [next(line[0] for line in options if line[3:] == columns[-1]) for options in lines]
    for letters in (data["answer"], last):
        counts = Counter(letters)
        assert set(counts) == set(ascii_uppercase[:count])
        assert all(abs(number - mean) < allowed for number in counts.values())
    assert abs(len(rows) - mean) > allowed  # control


def test_options_are_part_of_the_problem_in_the_template_and_the_chat(tmp_path):
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"q": "a?", "right": "b", "wrong": "c", "text": "1"}]
    keys: dict[str, Any] = {"columns": {"prompt": "q", "context": "text"}, "choices": ["right", "wrong"]}
    data = data_of(tmp_path, rows, tokenizer, prompt_template="Q{prompt}Q", **keys)
    assert data[0]["prompt"][0]["content"] in ("1Qa?\n\nA) b\nB) cQ", "1Qa?\n\nA) c\nB) bQ")
    assert data[0]["context"] == "1"


def test_the_letter_replaces_a_column_named_answer(tmp_path):
    """The file's column "answer" may hold an option, or an unused value."""
    rows = [{"prompt": f"{i}?", "answer": f"right {i}", "wrong": "wrong"} for i in range(9)]
    for choices in (["answer", "wrong"], ["wrong", "answer"]):
        data = data_of(tmp_path, rows, columns={}, choices=choices)
        assert data.column_names == ["prompt", "answer"]
        assert set(data["answer"]) == {"A", "B"}
    unused = [question(i, answer="12 m") for i in range(9)]
    assert set(data_of(tmp_path, unused)["answer"]) <= set("ABCD")
    assert data_of(tmp_path, unused).column_names == ["prompt", "answer", "Subdomain"]


def test_a_file_that_already_has_options_and_letters_needs_no_choices(tmp_path):
    rows = [{"prompt": "a?\n\nA) 1\nB) 2", "answer": "B"}]
    data = data_of(tmp_path, rows, columns={}, choices=None)
    assert data.to_list() == rows
    (letter,), _ = make_rewards(["letter"])
    assert letter(["The answer is (B).", "The answer is (A)."], answer=[*data["answer"], "B"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"Incorrect Answer 2": " \n"}, "row 2: expected an option (text) in column 'Incorrect Answer 2', got ' \\n'"),
        ({"Incorrect Answer 2": ""}, "row 2: expected an option (text) in column 'Incorrect Answer 2', got ''"),
        ({"Correct Answer": None}, "row 2: expected an option (text) in column 'Correct Answer', got null"),
        (
            {"Correct Answer": "12", "Incorrect Answer 3": " 12 "},
            "row 2: columns 'Correct Answer' and 'Incorrect Answer 3' hold equal options, ' 12 '",
        ),
    ],
)
def test_a_wrong_option_gives_a_one_line_error(replaced, message, tmp_path):
    rows = [question(0), question(1, **replaced), question(2)]
    for shuffle in (None, 1):
        with pytest.raises(UserError) as caught:
            data_of(tmp_path, rows, shuffle_seed=shuffle)
        assert str(caught.value).startswith(f"data.choices: {message}")
        assert "\n" not in str(caught.value)
    assert len(data_of(tmp_path, [rows[0], rows[2]])) == 2  # control


def test_wrong_columns_and_questions_give_one_line_errors(tmp_path):
    rows = [question(0)]
    with pytest.raises(
        UserError, match=r"^data\.choices: no column 'Wrong'; the source has Question, Correct Answer, "
    ):
        data_of(tmp_path, rows, choices=["Correct Answer", "Wrong"])
    with pytest.raises(UserError, match=r"^data\.choices: row 1: expected an option \(text\) in column 'n', got 3"):
        data_of(tmp_path, [question(0, n=3)], choices=["Correct Answer", "n"])
    chat = [question(0, Question=[{"role": "user", "content": "a?"}])]
    with pytest.raises(UserError, match=r"^data\.choices: row 1: a question with options must be text, got list"):
        data_of(tmp_path, chat)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"choices": ["a"]}, "choices: name 2 to 26 different columns, the right option's first; got ['a']"),
        ({"choices": []}, "choices: name 2 to 26 different columns"),
        ({"choices": ["a", "b", "a"]}, "choices: name 2 to 26 different columns"),
        ({"choices": [f"c{i}" for i in range(27)]}, "choices: name 2 to 26 different columns"),
        ({"choices": ["a", 3]}, "choices[1]: expected text"),
        ({"choices": ["a", "b"], "columns": {"answer": "c"}}, "columns.answer: has no effect with choices"),
        ({"choices": ["a", "b"], "answer_after": "##"}, "answer_after: has no effect with choices"),
        ({"choices": ["a", "b"], "choices_seed": -1}, "choices_seed: expected a whole number >= 0"),
        ({"choices_seed": 1}, "choices_seed: has no effect without choices; remove choices_seed"),
        (
            {"choices": ["a", "b"], "path": None, "synthetic": {"task": "running_sum", "size": 1}},
            "choices: has no effect",
        ),
    ],
)
def test_wrong_keys_give_one_line_errors(keys, message):
    with pytest.raises(UserError) as caught:
        DataConfig(**{"path": "rows.jsonl", **keys})
    assert str(caught.value).startswith(message)
    DataConfig(path="rows.jsonl", choices=[f"c{i}" for i in range(26)], choices_seed=1)  # control
