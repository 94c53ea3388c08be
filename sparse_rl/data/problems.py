"""Turn the rows of a `data:` block into rows {prompt, answer, ...}. source.py reads them.

`prompt` is text, or a list of chat messages if a chat template is used; tokens.py tokenizes both. If a row has a
`context`, the prompt begins with it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

import datasets

from sparse_rl.config import show
from sparse_rl.data.config import TASK_KEYS, DataConfig
from sparse_rl.data.source import Row, matching_rows, read, table, without_nulls
from sparse_rl.data.synthetic import TASKS
from sparse_rl.data.tokens import Prompt, part_separator, prompt_ids, with_context
from sparse_rl.errors import UserError, listed
from sparse_rl.progress import stage

logger = logging.getLogger(__name__)
TEXT_PARTS = ("text", "input_text", "output_text")  # types of a message's parts that vLLM reads as text
FLOATS = (datasets.Value("float16"), datasets.Value("float32"))
SHOWN = 3  # number of dropped rows in the log
STARTED = "Complete this Python code so that it solves the problem:\n\n```python\n{code}\n```"
FROM_INPUT = "Write a Python program that reads the input from standard input and prints the answer to standard output."
FENCED = "Put the whole program into one block at the end of your answer, between ```python and ```."


def load_data(
    config: DataConfig,
    tokenizer: Any = None,
    *,
    require: Sequence[str] = ("prompt",),
    where: str = "data",
    room: int | None = None,
) -> datasets.Dataset:
    """Load a dataset: shuffle its rows, render the prompts, drop too long ones, and stop at the limit, as configured.

    require : required columns among prompt, answer and completion (SFT needs prompt and completion)
    where : dotted key of the block in the recipe, for error messages
    room : maximum number of tokens in a prompt if completions are sampled; None means no limit

    The returned columns are `prompt` (str, or a list of messages), `answer` (str) if the source or `choices` gives one,
    `completion` (in the form of the prompt) if `require` or `config.columns` names it, `context` (str) and `tests` if
    `config.columns` names them, and the source's other columns, unchanged. The prompt includes the context. Raises
    UserError for unreadable, incomplete or missing rows.
    """
    try:
        return _load(config, tokenizer, require, room)
    except UserError as error:
        raise UserError(error.message, f"{where}.{error.key}" if error.key else where) from error.__cause__


def _load(config: DataConfig, tokenizer: Any, require: Sequence[str], room: int | None) -> datasets.Dataset:
    if config.traces:
        raise UserError("only recipes of kind grpo, distill and sft train on recorded rollouts, by train", "traces")
    source, filled = (_synthetic(config, "completion" in require), set()) if config.synthetic else read(config)
    columns = _columns(config, source.column_names, require)
    if config.max_prompt_tokens and tokenizer is None:
        raise UserError("cannot be applied without a tokenizer", "max_prompt_tokens")
    if "answer" in columns and source.features[columns["answer"]] in FLOATS:  # 0.1, and not 0.10000000149011612
        source = source.cast_column(columns["answer"], datasets.Value("string"))
    renderer = Renderer(config, tokenizer, columns, room)
    order = matching_rows(source, config.where) if config.where else list(range(len(source)))
    if config.shuffle_seed is not None:
        random.Random(config.shuffle_seed).shuffle(order)
    picked = source.select_columns(sorted({*columns.values(), *(config.choices or ())}))
    kept: list[int] = []
    rendered: list[dict[str, Any]] = []
    bad: list[UserError] = []
    too_long = 0
    most = min(len(order), config.limit or len(order))
    with stage("reading", config.path or "", total=most, unit="row") as progress:
        for index in order:
            if len(kept) == most:
                break
            try:
                row = {name: without_nulls(v) if name in filled else v for name, v in picked[index].items()}
                rendered_row = renderer.render(row)
            except (UserError, UnicodeDecodeError) as error:  # Arrow fails at invalid UTF-8 when a row is read
                wrong = error if isinstance(error, UserError) else UserError("not UTF-8; re-encode the file", "path")
                bad.append(UserError(f"row {index + 1}: {wrong.message}", wrong.key))
                if config.on_bad_row == "stop":
                    raise bad[0] from error.__cause__
                continue
            if rendered_row is None:
                too_long += 1
                continue
            kept.append(index)
            rendered.append(rendered_row)
            progress.advance()
    if bad:
        first = "; ".join(str(error) for error in bad[:SHOWN])
        logger.warning("dropped %d rows that cannot be used, kept %d: %s", len(bad), len(kept), first)
    if too_long:
        line = "dropped %d prompts longer than %d tokens, kept %d"
        logger.warning(line, too_long, config.max_prompt_tokens, len(kept))
    if not kept:
        why = f"all {too_long} prompts are longer than {config.max_prompt_tokens} tokens; raise the limit"
        long, empty = UserError(why, "max_prompt_tokens"), UserError("the dataset has no rows", "path")
        raise bad[0] if bad else long if too_long else empty
    used = {*columns, *columns.values(), *(config.choices or ()), *rendered[0]}
    names = {name: name for name in source.column_names if name not in used}
    if "tests" in columns:
        names[columns["tests"]] = "tests"
    others = source.select_columns(list(names)).select(kept).rename_columns(names)
    exact = {name: [row[name] for row in rendered] for name in rendered[0]}
    for name, ours in names.items():
        if name in filled:
            exact[ours] = list(map(without_nulls, others[ours]))
    unchanged = others.remove_columns([name for name in exact if name in names.values()])
    parts = [part for part in (table(exact), unchanged) if part.column_names]
    return datasets.concatenate_datasets(parts, axis=1).select_columns([*rendered[0], *names.values()])


# ---- sources -----------------------------------------------------------------------------------------------


def _synthetic(config: DataConfig, with_response: bool) -> datasets.Dataset:
    synthetic = config.synthetic
    assert synthetic is not None
    try:
        keys = {key: getattr(synthetic, key) for key in TASK_KEYS[synthetic.task]}
        rows = TASKS[synthetic.task](**keys).rows(synthetic.split, synthetic.size, synthetic.seed, with_response)
        return datasets.Dataset.from_list(rows)
    except UserError as error:
        raise UserError(error.message, "synthetic") from None


# ---- rows --------------------------------------------------------------------------------------------------


def _columns(config: DataConfig, available: Sequence[str], require: Sequence[str]) -> dict[str, str]:
    """Return the columns to render, always including prompt: our name -> the source's name."""
    for column in config.choices or []:
        if column not in available:
            raise UserError(f"no column {column!r}; the source has {listed(available, column)}", "choices")
    wanted = {"prompt": "prompt"} | {name: name for name in require} | config.columns
    if config.choices is not None:
        wanted.pop("answer", None)
    elif "answer" in available:
        wanted.setdefault("answer", "answer")
    for name, column in wanted.items():
        if column not in available:
            mend = f"the source has {listed(available, column)}"
            mend += "" if name in config.columns else f"; name its column, as in columns: {{{name}: {available[0]}}}"
            raise UserError(f"no column {column!r}; {mend}", f"columns.{name}")
    return wanted


def _uses_chat(config: DataConfig, tokenizer: Any) -> bool:
    template = bool(getattr(tokenizer, "chat_template", None))
    if config.chat and tokenizer is not None and not template:
        raise UserError("the tokenizer has no chat template; set chat: false", "chat")
    chat = template if config.chat is None else config.chat
    if config.system_prompt is not None and not chat:
        raise UserError("needs a chat template, and the tokenizer has none; use prompt_template", "system_prompt")
    return chat


class Renderer:
    """Turns rows of a source into rows {prompt, answer, ...}. columns : our names of the columns -> the source's"""

    def __init__(self, config: DataConfig, tokenizer: Any, columns: Mapping[str, str], room: int | None) -> None:
        self.config, self.tokenizer, self.columns, self.room = config, tokenizer, columns, room
        self.chat = _uses_chat(config, tokenizer)
        self.separator = part_separator(tokenizer) if self.chat and tokenizer is not None else "\n"
        self.checks_thinking = self.chat and tokenizer is not None and config.thinking is not None

    def render(self, source_row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return a row, or None if its prompt has more than `max_prompt_tokens`. Raises UserError for a bad row."""
        config = self.config
        row = {name: source_row[column] for name, column in self.columns.items()}
        for name, value in row.items():
            if name != "starter_code" and (value is None or value in ("", []) or value != value):
                raise UserError(f"it has no {self.columns[name]!r}; drop or complete the row")
        if "starter_code" in row:
            row["prompt"] = with_instruction(row["prompt"], row["starter_code"])
        if config.choices:
            row["prompt"], row["answer"] = lettered(row["prompt"], source_row, config.choices, config.choices_seed)
        rendered = {"prompt": self._prompt(row["prompt"])}
        if "context" in row:
            rendered["prompt"] = with_context(rendered["prompt"], "", text_in(row["context"], "context"))
        if "answer" in row:
            rendered["answer"] = _answer(row["answer"], config.answer_after)
        if "completion" in row:
            rendered["completion"] = self._completion(row["completion"])
        if "context" in row:
            rendered["context"] = row["context"]
        return rendered if self.tokenizer is None or self._fits(rendered) else None

    def _fits(self, row: Mapping[str, Any]) -> bool:
        """Return False if a prompt has more than `max_prompt_tokens`. Raises UserError if it cannot be used."""
        most = self.config.max_prompt_tokens
        if not (self.chat or most or self.room):
            return True
        tokens = self._count(row["prompt"], row)
        if most and tokens > most:
            return False
        if not tokens:
            raise UserError("the prompt has no tokens; remove the problem")
        if self.room is not None and tokens > self.room:
            raise UserError(
                f"the prompt has {tokens:,} tokens, but max_completion_length leaves {self.room:,} of the "
                "model's context length; lower max_completion_length, or drop longer prompts with "
                f"max_prompt_tokens: {self.room}"
            )
        return True

    def _count(self, prompt: Prompt, row: Mapping[str, Any]) -> int:
        tokenizer, thinking = self.tokenizer, self.config.thinking
        try:
            ids = prompt_ids(prompt, tokenizer, thinking, row.get("context"))
            if self.chat and "completion" in row:
                tokenizer.apply_chat_template([*prompt, *row["completion"]], tokenize=False)
            if self.checks_thinking:
                self.checks_thinking = False
                if prompt_ids(prompt, tokenizer, not thinking) == prompt_ids(prompt, tokenizer, thinking):
                    logger.warning("thinking has no effect, because the chat template ignores enable_thinking")
        except Exception as error:  # a template may raise any exception, for example on a system role
            raise UserError(f"the tokenizer refuses the prompt: {error}") from error
        return len(ids)

    def _prompt(self, value: Any) -> Prompt:
        """Return the source's prompt (text, or messages) with template and system prompt applied."""
        config = self.config
        if isinstance(value, str):
            text = value if config.prompt_template is None else config.prompt_template.replace("{prompt}", value)
            if not self.chat:
                return text
            messages = [{"role": "user", "content": text}]
        else:
            if not _is_messages(value):
                raise UserError("neither text nor a list of {role, content}", "columns.prompt")
            if not self.chat:
                raise UserError("the prompts are chat messages, which need a tokenizer with a chat template", "chat")
            if config.prompt_template is not None:
                raise UserError("does not apply to chat messages; remove this key", "prompt_template")
            messages = self._messages(value, "prompt")
        if config.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.system_prompt})
        return messages

    def _completion(self, value: Any) -> Prompt:
        if not self.chat or not _is_messages(value):
            text = text_in(value, "completion")
            return [{"role": "assistant", "content": text}] if self.chat else text
        messages = self._messages(value, "completion")
        if not any(message.get("content") or message.get("tool_calls") for message in messages):
            raise UserError("the completion is empty; drop or complete the row", "columns.completion")
        return messages

    def _messages(self, value: Sequence[Row], column: str) -> list[Row]:
        """Return messages without keys that are null, as a server reads them, and with parts of text joined."""
        messages = []
        for place, message in enumerate(value, start=1):
            content = message.get("content")
            if isinstance(content, list):
                separator = "\n" if message["role"] == "tool" else self.separator
                texts = [part if isinstance(part, str) else _text_of(part) for part in content]
                content = None if None in texts else separator.join(map(str, texts))
            if not isinstance(content, str) and ("content" in message or not message.get("tool_calls")):
                wrong = f"must be text, or parts of text, got {show(message.get('content'))}"
                raise UserError(f"the content of message {place} {wrong}", f"columns.{column}")
            named = {key: item for key, item in message.items() if item is not None}
            messages.append(named if content is None else {**named, "content": content})
        return messages


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in value
    )


def _text_of(part: Any) -> str | None:
    """Return the text of a part of a message; None if the part is no text."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") in TEXT_PARTS else None
    return text if isinstance(text, str) else None


def text_in(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"expected text, got {type(value).__name__}", f"columns.{column}")
    return value


def _answer(value: Any, after: str | None) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise UserError(f"expected text or a number, got {type(value).__name__}", "columns.answer")
    text = str(value)
    if after is None:
        return text
    _, marker, answer = text.rpartition(after)
    if not marker or not answer.strip():
        raise UserError(f"nothing follows {after!r} in {text[-40:]!r}", "answer_after")
    return answer.strip()


# ---- multiple-choice questions, and problems that a program solves ---------------------------------------------------


def with_options(question: str, options: Sequence[str], mark: str = ")") -> str:
    """Return the question, an empty line, and one line for each of at most 26 options, such as "A) 12 m"."""
    lines = (f"{letter}{mark} {option}" for letter, option in zip(ascii_uppercase, options, strict=False))
    return "\n".join([question, "", *lines])


def lettered(question: Any, row: Mapping[str, Any], columns: Sequence[str], seed: int) -> tuple[str, str]:
    """Return the question with the stripped options of a row, in an order that depends only on the seed and the
    question's text, and the letter of the right option, whose column is the first of `columns`."""
    if not isinstance(question, str):
        raise UserError(f"a question with options must be text, got {type(question).__name__}", "choices")
    options: list[str] = []
    for column in columns:
        option = row[column]
        if not isinstance(option, str) or not option.strip():
            wrong = f"expected an option (text) in column {column!r}, got {show(option)}"
        elif option.strip() in options:
            wrong = (
                f"columns {columns[options.index(option.strip())]!r} and {column!r} hold equal options, {show(option)}"
            )
        else:
            options.append(option.strip())
            continue
        raise UserError(f"{wrong}; drop or mend the row", "choices")
    order = list(range(len(options)))
    random.Random(f"choices/{seed}/{question}").shuffle(order)
    return with_options(question, [options[place] for place in order]), ascii_uppercase[order.index(0)]


def with_instruction(problem: Any, starter_code: Any) -> str:
    """Return the problem, followed by an instruction to write a program that completes the code, or reads an input."""
    code = text_in(starter_code or "", "starter_code").rstrip()
    task = STARTED.replace("{code}", code) if code.strip() else FROM_INPUT
    return f"{text_in(problem, 'prompt').rstrip()}\n\n{task}\n\n{FENCED}"
