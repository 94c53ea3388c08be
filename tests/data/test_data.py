"""Datasets: the rows that the recipe names are returned in order, and every error names its row or column."""

import json
import logging
import socket

import pytest

from sparse_rl.data.config import DataConfig, SyntheticConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import RunningSum, split_of
from sparse_rl.data.tokens import prompt_ends, prompt_ids, split_prompt
from sparse_rl.errors import UserError

datasets = pytest.importorskip("datasets")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "{{ {'system': 'S', 'user': 'Q', 'assistant': 'A'}[m.role] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}A{% if enable_thinking is defined and enable_thinking %}[{% endif %}{% endif %}"
)
ROWS = [{"problem": f"a{i}", "answer": i, "level": "low"} for i in range(9)]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Disable the network, which a local file does not need, and the cache shared between tests."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("a local file went to the network"))


@pytest.fixture(scope="module")
def tokenizer():
    return RunningSum.tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A tokenizer with a chat template."""
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def file(tmp_path):
    """file(rows, name) writes rows as JSON lines, or a text unchanged, and returns the path."""

    def write(rows=ROWS, name="data.jsonl"):
        path = tmp_path / name
        text = rows if isinstance(rows, str | bytes) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def config(path, columns=None, **keys):
    """Return a data block that reads the prompts from the column "problem"."""
    return DataConfig(path=path, columns={"prompt": "problem"} if columns is None else columns, **keys)


def refused(config, tokenizer=None, **options):
    """Return the one-line error of data that is refused."""
    with pytest.raises(UserError) as caught:
        load_data(config, tokenizer, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_without_a_mapping_keep_their_names_and_values(file):
    data = load_data(config(file()))
    assert data.column_names == ["prompt", "answer", "level"]
    assert data["prompt"] == [row["problem"] for row in ROWS]
    assert data["answer"] == [str(row["answer"]) for row in ROWS]
    assert set(data["level"]) == {"low"}
    mapped = load_data(config(file(), {"prompt": "problem", "answer": "level", "completion": "problem"}))
    assert mapped.column_names == ["prompt", "answer", "completion"]
    assert mapped[3] == {"prompt": "a3", "answer": "low", "completion": "a3"}


def test_a_mapped_column_replaces_a_column_that_has_our_name(file):
    path = file([{"prompt": "theirs", "problem": "ours"}])
    assert load_data(config(path))["prompt"] == ["ours"]
    assert load_data(config(path, {}))["prompt"] == ["theirs"]
    assert load_data(config(str(path), {})).column_names == ["prompt", "problem"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_rows(suffix, tmp_path):
    path, table = str(tmp_path / f"x{suffix}"), datasets.Dataset.from_list(ROWS)
    if suffix == ".json":
        (tmp_path / "x.json").write_text(json.dumps(ROWS))
    else:
        {".jsonl": table.to_json, ".csv": table.to_csv, ".parquet": table.to_parquet}[suffix](path)
    data = load_data(config(path))
    assert data["prompt"] == [row["problem"] for row in ROWS]
    assert data["answer"] == [str(i) for i in range(9)]


def test_rows_are_shuffled_by_the_seed_and_then_limited(file):
    path = file()
    all_prompts = load_data(config(path))["prompt"][:]
    shuffled = load_data(config(path, shuffle_seed=1))
    assert sorted(shuffled["prompt"]) == all_prompts != shuffled["prompt"][:]
    assert all(prompt == f"a{answer}" for prompt, answer in zip(shuffled["prompt"], shuffled["answer"], strict=True))
    assert load_data(config(path, shuffle_seed=1))["prompt"][:] == shuffled["prompt"][:]
    assert load_data(config(path, shuffle_seed=2))["prompt"][:] != shuffled["prompt"][:]
    assert load_data(config(path, shuffle_seed=1, limit=4))["prompt"][:] == shuffled["prompt"][:4]
    assert load_data(config(path, limit=99))["prompt"][:] == all_prompts
    assert load_data(config(path, split="train[2:4]"))["prompt"][:] == all_prompts[2:4]


def test_a_prompt_template_keeps_other_braces(file):
    data = load_data(config(file(), prompt_template=r"{prompt} Put it in \boxed{}. {x}", limit=1))
    assert data["prompt"] == [r"a0 Put it in \boxed{}. {x}"]


def test_answer_after_takes_the_text_after_the_last_marker(file):
    path = file([{"problem": "a", "answer": "1 #### 2\n#### 42 "}])
    assert load_data(config(path, answer_after="####"))["answer"] == ["42"]
    assert load_data(config(path))["answer"] == ["1 #### 2\n#### 42 "]
    assert "row 1: nothing follows '===='" in refused(config(path, answer_after="===="))


def test_long_prompts_are_dropped_before_the_limit_and_counted(file, tokenizer, caplog):
    path = file([{"problem": "a" * n, "answer": "1"} for n in (1, 9, 2, 9, 3, 9, 4)])
    with caplog.at_level(logging.WARNING):
        data = load_data(config(path, max_prompt_tokens=5, limit=3), tokenizer)
    assert [len(prompt) for prompt in data["prompt"]] == [1, 2, 3]
    assert "dropped 2 prompts longer than 5 tokens, kept 3" in caplog.text
    caplog.clear()
    assert len(load_data(config(path, max_prompt_tokens=9), tokenizer)) == 7
    assert not caplog.text
    assert "data.max_prompt_tokens: cannot be applied without a tokenizer" in refused(config(path, max_prompt_tokens=5))


def test_prompts_become_messages_if_the_tokenizer_has_a_chat_template(file, tokenizer, chat_tokenizer):
    path = file()
    assert load_data(config(path, limit=1), tokenizer)["prompt"] == ["a0"]
    assert load_data(config(path, limit=1, chat=False), chat_tokenizer)["prompt"] == ["a0"]
    user = {"role": "user", "content": "a0"}
    assert load_data(config(path, limit=1), chat_tokenizer)["prompt"] == [[user]]
    with_system = load_data(config(path, limit=1, system_prompt="b", prompt_template="c{prompt}"), chat_tokenizer)
    assert with_system["prompt"] == [[{"role": "system", "content": "b"}, {**user, "content": "ca0"}]]
    with_completion = load_data(config(path, {"prompt": "problem", "completion": "level"}, limit=1), chat_tokenizer)
    assert with_completion["completion"] == [[{"role": "assistant", "content": "low"}]]
    assert "data.chat: the tokenizer has no chat template" in refused(config(path, chat=True), tokenizer)
    assert "data.system_prompt: needs a chat template" in refused(config(path, system_prompt="b"), tokenizer)


def test_prompts_that_already_are_messages_are_kept(file, tokenizer, chat_tokenizer):
    messages = [{"role": "user", "content": "a"}]
    path = file([{"prompt": messages}])
    assert load_data(config(path, {}, system_prompt="b"), chat_tokenizer)["prompt"][0][1:] == messages
    assert "chat messages, which need" in refused(config(path, {}), tokenizer)
    assert "does not apply" in refused(config(path, {}, prompt_template="{prompt}"), chat_tokenizer)
    assert "neither text nor a list" in refused(config(file([{"prompt": [1]}], "b.jsonl"), {}), chat_tokenizer)


def test_prompt_ids_equal_the_tokens_of_the_formatted_text(tokenizer, chat_tokenizer):
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a1"}]
    for prompt, thinking, text in [
        ("Qa1?", None, "Qa1?"),
        (messages, None, "Sb;Qa1;A"),
        (messages, False, "Sb;Qa1;A"),
        (messages, True, "Sb;Qa1;A["),
        ([*messages, {"role": "assistant", "content": "c2"}], None, "Sb;Qa1;Ac2"),
    ]:
        ids = prompt_ids(prompt, chat_tokenizer, thinking)
        assert type(ids) is list
        assert all(type(i) is int for i in ids)
        assert ids == tokenizer(text)["input_ids"]
        ends = [tokenizer.decode(end) for end in (ids, (ids * 9)[-16:])]
        assert prompt_ends([ids, ids * 9], chat_tokenizer) == ends


def test_prompt_ids_accepts_tokenizers_that_return_nested_lists_or_tensors():
    class Odd:
        def __call__(self, text):
            return {"input_ids": [[1, 2]]}

        def apply_chat_template(self, messages, **options):
            import torch

            return {"input_ids": torch.tensor([[3, 4]])}

    assert prompt_ids("x", Odd()) == [1, 2]
    assert prompt_ids([{"role": "user", "content": "x"}], Odd()) == [3, 4]


def test_an_error_of_the_chat_template_names_the_row(file, chat_tokenizer):
    path = file([{"prompt": [{"role": "alien", "content": "a"}]}])
    assert "row 1: the tokenizer refuses the prompt: no aliens" in refused(config(path, {}), chat_tokenizer)


NO_SYSTEM = (  # of Gemma 2's kind
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)
INTO_USER = (  # of Gemma 3's kind: the system message becomes the start of the first user message
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + ';' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}"
    "{% endif %}Q{{ first if loop.first else '' }}{{ m.content | trim }};{% endfor %}A"
)


def with_template(template):
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_without_a_system_role_is_refused(file):
    path, tokenizer = file(), with_template(NO_SYSTEM)
    error = "data: row 1: the tokenizer refuses the prompt: System role not supported"
    assert refused(config(path, system_prompt="b"), tokenizer) == error
    assert refused(config(path, system_prompt="b", max_prompt_tokens=9), tokenizer) == error
    assert refused(config(path, system_prompt="b"), tokenizer, where="tasks.a").startswith("tasks.a: row 1")
    assert len(load_data(config(path), tokenizer)) == len(ROWS)
    own = file([{"problem": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}], "own.jsonl")
    assert refused(config(own), tokenizer).startswith("data: row 1: the tokenizer refuses the prompt: System role")
    alien = file([{"problem": [{"role": "alien", "content": "a"}]}], "alien.jsonl")
    assert refused(config(alien, system_prompt="b"), tokenizer).startswith("data: row 1: the tokenizer refuses")


def test_a_template_may_put_the_system_prompt_into_the_first_user_message(file):
    tokenizer = with_template(INTO_USER)
    rows = load_data(config(file(), system_prompt="ab"), tokenizer)
    for prompt in rows["prompt"]:
        joined = [{"role": "user", "content": f"ab;{prompt[1]['content']}"}]
        assert prompt_ids(prompt, tokenizer) == prompt_ids(joined, tokenizer)
    context = "c" * 5
    cut = [{"role": "system", "content": "ab"}, {"role": "user", "content": f"{context}d?"}]
    split = split_prompt(cut, context, tokenizer)
    assert tokenizer.decode(split.context) == f"Qab;{context}"
    assert tokenizer.decode(split.rest) == "d?;A"
    assert prompt_ids(cut, tokenizer, context=context) == prompt_ids(cut, tokenizer)


def test_a_synthetic_data_block_gives_the_rows_of_its_task(tokenizer):
    synthetic = DataConfig(synthetic=SyntheticConfig(task="running_sum", size=20, split="evaluation", seed=3))
    data = load_data(synthetic, tokenizer)
    assert data.to_list() == RunningSum().rows("evaluation", 20, 3)
    worked = load_data(synthetic, tokenizer, require=("prompt", "completion"))
    assert worked["completion"][:] == [row["completion"] for row in RunningSum().rows("evaluation", 20, 3, True)]
    assert {split_of(tuple(map(int, prompt[2:-1:2]))) for prompt in data["prompt"]} == {"evaluation"}
    small = SyntheticConfig(task="running_sum", size=99, n=2, digits=2)
    assert "data.synthetic: running sum: found only" in refused(DataConfig(synthetic=small))


def test_errors_name_the_key_and_the_valid_choices(file, tmp_path, tokenizer):
    path = file()
    assert refused(config("nowhere.jsonl")) == "data.path: no such file: nowhere.jsonl"
    assert refused(config("nowhere.jsonl"), where="tasks.a").startswith("tasks.a.path: no such file")
    assert "data.columns.prompt: no column 'x'; the source has problem, answer, level" in refused(
        config(path, {"prompt": "x"})
    )
    assert "no column 'prompt'" in refused(config(path, {}))
    assert "columns: {prompt: problem}" in refused(config(path, {}))
    assert "no column 'completion'" in refused(config(path), require=("prompt", "completion"))
    assert "none of the supported formats: .jsonl" in refused(config(file(name="data.txt")))
    assert "data.max_prompt_tokens: all 9 prompts are longer than 1 tokens; raise the limit" in refused(
        config(path, max_prompt_tokens=1), tokenizer
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "a"}\n\n{"problem": "b"\n', "line 3 is not JSON: Expecting ',' delimiter"),
        ('{"problem": "a"}\nhello\n', "line 2 is not JSON"),
        (b'{"problem": "a"}\n{"problem": "\xff"}\n', "line 2 is not UTF-8"),
        (b'{"problem": "a"}\n{"problem": "\xff"\n', "line 2 is not UTF-8"),
        ("", "has no rows"),
        ('{"problem": "a"}\n{"problem": null}\n', "row 2: it has no 'problem'"),
        ('{"problem": "a"}\n{"other": "b"}\n', "row 2: it has no 'problem'"),
        ('{"problem": ""}\n', "row 1: it has no 'problem'"),
        ('{"problem": "a", "answer": [1]}\n', "data.columns.answer: row 1: expected text or a number, got list"),
        ('{"problem": 3}\n', "data.columns.prompt: row 1: neither text"),
    ],
)
def test_errors_of_damaged_files_name_the_line(text, message, file):
    assert message in refused(config(file(text)))


def test_an_unreadable_or_empty_table_is_refused(file):
    assert "cannot be read" in refused(config(file("nonsense", "x.parquet")))
    assert "has no rows" in refused(config(file("problem,answer\n", "x.csv")))


def test_an_error_names_the_row_of_the_file_even_after_shuffling(file):
    path = file([*ROWS, {"problem": None, "answer": 1}])
    assert "row 10: " in refused(config(path, shuffle_seed=5))


def test_an_error_of_the_hub_gives_one_line(monkeypatch):
    def fail(path, subset, split):
        raise ConnectionError(f"no route to {path} {subset} {split}\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert refused(config("org/name", subset="main", split="test")) == (
        "data.path: cannot load 'org/name' (split 'test'): no route to org/name main test second line"
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda path, subset, split: datasets.Dataset.from_list(ROWS))
    assert len(load_data(config("org/name"))) == 9


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_that_nests_too_deeply_is_refused(file, tmp_path, suffix, opening):
    """Arrow's reader is recursive, so 20,000 levels would crash the process."""
    path = tmp_path / f"deep{suffix}"
    shallow = (
        '{"prompt": "' + "[{" * 500 + '", "more": ' + opening * 30 + "1" + {"[": "]", "{": "}"}[opening[0]] * 30 + "}"
    )
    path.write_text(shallow)
    assert load_data(config(str(path), {})).column_names == ["prompt", "more"]  # control
    path.write_text(shallow + "\n" + shallow.replace(opening * 30, opening * 20_000))
    assert "nested more than 64 deep" in refused(config(str(path), {}))
