"""A prompt with a context (a long text before the question) is tokenized in two parts, cut after the context, so that
all questions about a context share its tokens. The cut changes no text, and a mistake gives one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from sparse_rl.data.config import DataConfig
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import RunningSum
from sparse_rl.data.tokens import prompt_ids, split_prompt, with_context
from sparse_rl.errors import UserError

HEADER = "{{ {'system': 'N', 'user': 'Q', 'assistant': 'A'}[m.role] }}"
END = "{% if add_generation_prompt %}A{% if enable_thinking is defined and enable_thinking %}[{% endif %}{% endif %}"
TEMPLATE = f"{{% for m in messages %}}{HEADER}{{{{ m.content }}}};{{% endfor %}}{END}"
TRIMS = TEMPLATE.replace("m.content", "m.content | trim")
DROPS = TEMPLATE.replace("m.content", "'' if m.role == 'user' else m.content")
CONTEXT = "a1b2=c3;a"
CHATS = {
    "user": [{"role": "user", "content": f"{CONTEXT}Qa?"}],
    "system": [{"role": "system", "content": f"b{CONTEXT}"}, {"role": "user", "content": f"{CONTEXT}b?"}],
    "turns": [
        {"role": "user", "content": f"{CONTEXT}a?"},
        {"role": "assistant", "content": "1;"},
        {"role": "user", "content": CONTEXT},
    ],
    "begun": [{"role": "user", "content": f"{CONTEXT}a?"}, {"role": "assistant", "content": "a1A1"}],
}


def tokenizer_with(template: str | None = None, around: str = "") -> Any:
    """Return the quickstart's tokenizer. `around` is the template of the tokens added around a text, such as "<eos>
    $A"."""
    tokenizer = RunningSum.tokenizer()
    tokenizer.chat_template = template
    if around:
        special = [("<eos>", tokenizer.convert_tokens_to_ids("<eos>"))]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=around, special_tokens=special)
    return tokenizer


def data_of(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any, **keys: Any) -> Any:
    """Return the data set of a data block whose file has these rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(DataConfig(path=str(tmp_path / "rows.jsonl"), **keys), tokenizer)


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("thinking", [None, True])
def test_a_chat_is_cut_right_after_its_context(kind, thinking):
    tokenizer, chat = tokenizer_with(TEMPLATE), CHATS[kind]
    cut = split_prompt(chat, CONTEXT, tokenizer, thinking)
    whole = prompt_ids(chat, tokenizer, thinking, CONTEXT)
    assert [*cut.context, *cut.rest] == whole == prompt_ids(chat, tokenizer, thinking)  # no token spans a cut
    assert tokenizer.decode(cut.context[cut.first :]) == CONTEXT
    assert tokenizer.decode(cut.context[: cut.first]) == ("Nb" + CONTEXT + ";Q" if kind == "system" else "Q")
    other_question = [*chat[:-1], {**chat[-1], "content": chat[-1]["content"] + "b"}]
    assert split_prompt(other_question, CONTEXT, tokenizer, thinking).context == cut.context
    assert split_prompt(other_question, CONTEXT, tokenizer, thinking).rest != cut.rest


def test_a_token_that_spans_the_cut_is_split():
    """`\\boxed{` is one token; if the context ends inside it, both parts together have more tokens."""
    tokenizer = tokenizer_with(TEMPLATE)
    chat = [{"role": "user", "content": "a\\boxed{1}"}]
    cut = split_prompt(chat, "a\\boxed", tokenizer)
    joint = prompt_ids(chat, tokenizer)
    assert len(cut.context) + len(cut.rest) > len(joint)
    assert prompt_ids(chat, tokenizer, None, "a\\boxed") != joint


@pytest.mark.parametrize(("around", "first"), [("", 0), ("<eos> $A", 1), ("<eos> <eos> $A", 2)])
def test_the_context_of_a_plain_text_begins_with_the_tokenizers_first_tokens(around, first):
    tokenizer = tokenizer_with(around=around)
    cut = split_prompt(f"{CONTEXT}Qa?", CONTEXT, tokenizer)
    assert cut.first == first
    assert cut.context == tokenizer(CONTEXT)["input_ids"]
    assert [*cut.context, *cut.rest] == tokenizer(f"{CONTEXT}Qa?")["input_ids"]
    assert tokenizer.decode(cut.rest) == "Qa?"


def test_a_prompt_that_cannot_be_cut_after_its_context_is_refused():
    chat = CHATS["user"]
    for template, context in ((TRIMS, " a1"), (DROPS, CONTEXT)):
        with pytest.raises(UserError, match="the chat template changes the context"):
            split_prompt([{"role": "user", "content": f"{context}Qa?"}], context, tokenizer_with(template))
    assert split_prompt([{"role": "user", "content": "a1 ?"}], "a1 ", tokenizer_with(TRIMS)).rest  # control
    with pytest.raises(UserError, match="adds tokens at the end of a text"):
        split_prompt(f"{CONTEXT}Q", CONTEXT, tokenizer_with(around="$A <eos>"))
    with pytest.raises(UserError, match=r"must begin a user message, but there is none"):
        with_context([{"role": "system", "content": "a"}], "", CONTEXT)
    assert with_context(CHATS["turns"], CONTEXT, "b", "?") == [{"role": "user", "content": "b?"}]
    assert with_context(chat, CONTEXT, "b") == [{"role": "user", "content": "bQa?"}]
    assert with_context("abc", "a", "x") == "xbc"
    assert with_context("abc", "a", "x", "y") == "xy"


def test_a_prompt_that_does_not_begin_with_its_context_is_refused():
    """The usual form of such rows is a question beside its document, which the cut would lose."""
    tokenizer = tokenizer_with(TEMPLATE)
    for prompt in (
        "Qa?",
        "b" + CONTEXT,
        [{"role": "user", "content": "Qa?"}],
        [{"role": "user", "content": "b" + CONTEXT}],
    ):
        with pytest.raises(UserError, match="must begin with its context"):
            split_prompt(prompt, CONTEXT, tokenizer)
        with pytest.raises(UserError, match="must begin with its context"):
            with_context(prompt, CONTEXT, CONTEXT, "?")


ROWS = [{"article": CONTEXT, "question": f"a{i}", "answer": i} for i in range(3)]
COLUMNS = {"context": "article", "prompt": "question"}


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_context_stands_before_the_problem(template, tmp_path):
    tokenizer = tokenizer_with(template)
    keys: dict[str, Any] = {"columns": COLUMNS, "prompt_template": ";Q{prompt}?"}
    data = data_of(tmp_path, ROWS, tokenizer, **keys)
    text = f"{CONTEXT};Qa1?"
    assert data[1]["prompt"] == (text if template is None else [{"role": "user", "content": text}])
    assert data[1]["context"] == CONTEXT
    assert data[1]["answer"] == "1"
    assert "article" not in data.column_names
    if template is not None:
        data = data_of(tmp_path, ROWS, tokenizer, **keys, system_prompt="b")
        assert [m["content"] for m in data[1]["prompt"]] == ["b", text]
    longest = max(len(prompt_ids(p, tokenizer)) for p in data["prompt"])
    assert len(data_of(tmp_path, ROWS, tokenizer, columns=COLUMNS, max_prompt_tokens=longest)) == 3
    with pytest.raises(UserError, match="all 3 prompts are longer than 5 tokens"):
        data_of(tmp_path, ROWS, tokenizer, columns=COLUMNS, max_prompt_tokens=5)


def test_the_context_of_a_chat_begins_the_first_user_message(tmp_path):
    rows = [{"prompt": CHATS["turns"][1:], "text": "b"}]
    data = data_of(tmp_path, rows, tokenizer_with(TEMPLATE), columns={"context": "text"})
    assert [m["content"] for m in data[0]["prompt"]] == ["1;", f"b{CONTEXT}"]


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([{"prompt": "a", "text": ""}], {"context": "text"}, "row 1: it has no 'text'"),
        ([{"prompt": "a", "text": "b"}, {"prompt": "a"}], {"context": "text"}, "row 2: it has no 'text'"),
        ([{"prompt": "a", "text": 3}], {"context": "text"}, r"columns\.context: row 1: expected text, got int"),
        ([{"prompt": "a"}], {"context": "text"}, r"columns\.context: no column 'text'"),
        ([{"prompt": [{"role": "system", "content": "b"}], "text": "b"}], {"context": "text"}, "but there is none"),
        (
            [{"prompt": "a", "text": " b"}],
            {"context": "text"},
            "row 1: the tokenizer refuses the prompt: the chat template",
        ),
    ],
)
def test_a_mistake_in_a_context_gives_a_one_line_error(rows, columns, message, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        data_of(tmp_path, rows, tokenizer_with(TRIMS), columns=columns)
    assert "\n" not in str(caught.value)


def test_a_column_named_context_is_not_used_as_the_context(tmp_path):
    data = data_of(tmp_path, [{"prompt": "a", "context": "b"}], tokenizer_with())
    assert data[0] == {"prompt": "a", "context": "b"}
