"""Load the dataset of a `data:` block as rows {prompt, answer, ...}. Local files are read without network access.

`prompt` is text, or a list of chat messages if a chat template is used; tokens.py tokenizes both. If a row has a
`context`, the prompt begins with it.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

import datasets

from sparse_rl.data import one_liners, retrieval, running_sum
from sparse_rl.data.choices import lettered
from sparse_rl.data.code import with_instruction
from sparse_rl.data.config import LOCAL_FILES, DataConfig
from sparse_rl.data.tokens import least_tokens, prompt_ids, with_context
from sparse_rl.data.where import matching_rows
from sparse_rl.errors import UserError, listed

logger = logging.getLogger(__name__)
MOST_LEVELS = 64  # limit for nesting in JSON
JSON_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def load_data(
    config: DataConfig, tokenizer: Any = None, *, require: Sequence[str] = ("prompt",), where: str = "data"
) -> datasets.Dataset:
    """Load a dataset: shuffle its rows, render the prompts, drop too long ones, and stop at the limit, as configured.

    tokenizer : its chat template is used if it has one, and it counts tokens for `max_prompt_tokens`
    require : required columns among prompt, answer and completion (SFT needs prompt and completion)
    where : dotted key of the block in the recipe, for error messages

    The returned columns are `prompt` (str, or a list of messages), `answer` (str) if the source or `choices` gives one,
    `completion` (in the form of the prompt) if `require` or `config.columns` names it, `context` (str) and `tests` if
    `config.columns` names them, and the source's other columns, unchanged. The prompt includes the context. Raises
    UserError for unreadable, incomplete or missing rows.
    """
    try:
        return _load(config, tokenizer, require)
    except UserError as error:
        raise UserError(error.message, f"{where}.{error.key}" if error.key else where) from error.__cause__


def _load(config: DataConfig, tokenizer: Any, require: Sequence[str]) -> datasets.Dataset:
    source = _synthetic(config, "completion" in require) if config.synthetic else _read(config)
    if config.where:
        source = source.select(matching_rows(source, config.where))
    columns = _columns(config, source.column_names, require)
    chat = _uses_chat(config, tokenizer)
    if config.max_prompt_tokens and tokenizer is None:
        raise UserError("cannot be applied without a tokenizer", "max_prompt_tokens")

    order = list(range(len(source)))
    if config.shuffle_seed is not None:
        random.Random(config.shuffle_seed).shuffle(order)
    choices = config.choices or []
    picked = source.select_columns(sorted({*columns.values(), *choices}))
    kept: list[int] = []
    rendered: list[dict[str, Any]] = []
    too_long = 0
    for index in order:
        if len(kept) == config.limit:
            break
        try:
            source_row = picked[index]
        except UnicodeDecodeError:  # Arrow reads invalid UTF-8, and fails only on access
            raise UserError(f"row {index + 1} of the source is not UTF-8; re-encode the file", "path") from None
        row = {name: source_row[column] for name, column in columns.items()}
        for name, value in row.items():
            if name != "starter_code" and (value is None or value == "" or value == []):
                raise UserError(f"row {index + 1} of the source has no {columns[name]!r}; drop or complete the row")
        if "starter_code" in row:
            try:
                row["prompt"] = with_instruction(row["prompt"], row["starter_code"])
            except UserError as error:
                raise UserError(f"row {index + 1}: {error.message}", "columns.starter_code") from None
        if choices:
            try:
                row["prompt"], row["answer"] = lettered(row["prompt"], source_row, choices, config.choices_seed)
            except UserError as error:
                raise UserError(f"row {index + 1}: {error.message}", "choices") from None
        prompt, context = _prompt(row["prompt"], config, chat, index), row.get("context")
        if context is not None:
            prompt = _prepend_context(context, prompt, index)
        if config.max_prompt_tokens or (chat and tokenizer is not None and not kept and not too_long):
            try:
                length = least_tokens(prompt, tokenizer)  # enough to drop a text that is far too long
                if length <= (config.max_prompt_tokens or length):
                    length = len(prompt_ids(prompt, tokenizer, config.thinking, context))
            except Exception as error:  # a template may raise any exception, for example on a system role
                key = "system_prompt" if _only_system_refused(prompt, config, tokenizer) else ""
                raise UserError(f"the tokenizer refuses the prompt of row {index + 1}: {error}", key) from error
            if config.max_prompt_tokens and length > config.max_prompt_tokens:
                too_long += 1
                continue
        rendered_row = {"prompt": prompt}
        if "answer" in row:
            rendered_row["answer"] = _answer(row["answer"], config, index)
        if "completion" in row:
            rendered_row["completion"] = _completion(row["completion"], chat, index)
        kept.append(index)
        rendered.append(rendered_row if context is None else {**rendered_row, "context": context})
    if too_long:
        logger.warning(
            "dropped %d prompts longer than %d tokens, kept %d", too_long, config.max_prompt_tokens, len(kept)
        )
    if not kept and too_long:
        message = f"all {too_long} prompts are longer than {config.max_prompt_tokens} tokens; raise the limit"
        raise UserError(message, "max_prompt_tokens")
    if not kept:
        raise UserError("the dataset has no rows", "path")
    used = {*columns, *columns.values(), *choices, *rendered[0]}
    others = [name for name in source.column_names if name not in used]
    parts = [datasets.Dataset.from_list(rendered), source.select_columns(others).select(kept)]
    if "tests" in columns:
        tests = source.select_columns(columns["tests"]).select(kept)
        parts.append(tests if columns["tests"] == "tests" else tests.rename_column(columns["tests"], "tests"))
    return datasets.concatenate_datasets([part for part in parts if part.column_names], axis=1)


# ---- sources -----------------------------------------------------------------------------------------------


def _synthetic(config: DataConfig, with_response: bool) -> datasets.Dataset:
    synthetic = config.synthetic
    assert synthetic is not None
    arguments = synthetic.split, synthetic.size, synthetic.seed, with_response
    try:
        if synthetic.task == "retrieval":
            made_rows = retrieval.rows(
                *arguments, retrieval.Retrieval(synthetic.facts, synthetic.restated, synthetic.filler)
            )
        elif synthetic.task == "one_liners":
            made_rows = one_liners.rows(*arguments, one_liners.OneLiners(synthetic.cases, synthetic.note_probability))
        else:
            made_rows = running_sum.rows(
                *arguments, running_sum.RunningSum(synthetic.n, synthetic.digits, synthetic.note_probability)
            )
        return datasets.Dataset.from_list(made_rows)
    except UserError as error:
        raise UserError(error.message, "synthetic") from None


def _read(config: DataConfig) -> datasets.Dataset:
    assert config.path is not None
    if not config.local:
        if Path(config.path).is_file():
            raise UserError(f"{config.path} has none of the supported formats: {', '.join(LOCAL_FILES)}", "path")
        try:
            if config.files is not None:
                return _hub_files(config, config.files)
            return datasets.load_dataset(config.path, config.subset, split=config.split)
        except Exception as error:  # not found, no network, no such subset or split
            raise UserError(f"cannot load {config.path!r} (split {config.split!r}): {error}", "path") from error

    path = Path(config.path).expanduser()
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "no such file"
        raise UserError(f"{problem}: {config.path}", "path")
    if path.stat().st_size == 0:
        raise UserError(f"{config.path} is empty", "path")
    suffix = path.suffix.lower()
    _refuse_deep(path, suffix)
    try:
        builder = datasets.load_dataset_builder(_builder(suffix), data_files=str(path))
        builder.download_and_prepare()
    except Exception as error:
        cause = error.__cause__ or error
        problem = (_bad_line(path) if suffix == ".jsonl" else None) or str(cause) or type(cause).__name__
        raise UserError(f"{config.path} cannot be read: {problem}", "path") from error
    try:
        return builder.as_dataset(config.split)
    except Exception as error:  # the file or the slice is empty, or the split does not exist
        raise UserError(f"{config.path} has no rows of split {config.split!r}: {error}", "path") from error


def _hub_files(config: DataConfig, files: Sequence[str]) -> datasets.Dataset:
    places = [f"hf://datasets/{config.path}/{file}" for file in files]
    kind = _builder(PurePosixPath(files[0]).suffix)
    return datasets.load_dataset(kind, data_files={config.split.partition("[")[0]: places}, split=config.split)


def _builder(suffix: str) -> str:
    """Return the name of the dataset builder for a file's suffix."""
    return {".jsonl": "json"}.get(suffix, suffix[1:])


def _refuse_deep(path: Path, suffix: str) -> None:
    """Raise UserError for JSON nested deeper than MOST_LEVELS, which can crash the process in Arrow."""
    if suffix not in (".json", ".jsonl"):
        return
    with path.open("rb") as file:
        for number, text in enumerate([file.read()] if suffix == ".json" else file, start=1):
            if text.count(b"[") + text.count(b"{") > MOST_LEVELS and _levels(text) > MOST_LEVELS:
                where = "" if suffix == ".json" else f", line {number}"
                raise UserError(f"{path}{where}: lists and objects are nested more than {MOST_LEVELS} deep", "path")


def _levels(text: bytes) -> int:
    brackets = re.findall(rb"[\[{\]}]", JSON_STRING.sub(b"", text))
    return max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)


def _bad_line(path: Path) -> str | None:
    """Describe the first line of a JSONL file that is not a JSON object. None means that there is none."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                return f"line {number} is not JSON: {error.msg} at column {error.colno}"
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8"
            if not isinstance(value, dict):
                return f"line {number} is not a JSON object"
    return None


# ---- rows --------------------------------------------------------------------------------------------------


def _columns(config: DataConfig, available: Sequence[str], require: Sequence[str]) -> dict[str, str]:
    """Return the columns to render, always including prompt: our name -> the source's name.

    With `choices`, there is no column of answers; this function only checks that the columns of the options exist.
    """
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


def _prompt(value: Any, config: DataConfig, chat: bool, index: int) -> str | list[dict[str, Any]]:
    """Return the source's prompt (text, or messages) with template and system prompt applied."""
    if isinstance(value, str):
        text = value if config.prompt_template is None else config.prompt_template.replace("{prompt}", value)
        if not chat:
            return text
        messages = [{"role": "user", "content": text}]
    else:
        if not _is_messages(value):
            raise UserError(f"row {index + 1} is neither text nor a list of {{role, content}}", "columns.prompt")
        if not chat:
            raise UserError("the prompts are chat messages, which need a tokenizer with a chat template", "chat")
        if config.prompt_template is not None:
            raise UserError("does not apply to prompts that are chat messages; remove this key", "prompt_template")
        messages = list(value)
    if config.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def _only_system_refused(prompt: str | list[dict[str, Any]], config: DataConfig, tokenizer: Any) -> bool:
    """Return True if the tokenizer refuses a prompt because of the system message that the recipe adds to it."""
    if config.system_prompt is None:
        return False
    try:
        return bool(prompt_ids(prompt[1:], tokenizer, config.thinking))
    except Exception:  # a template may raise any exception
        return False


def _prepend_context(context: Any, prompt: str | list[dict[str, Any]], index: int) -> Any:
    if not isinstance(context, str):
        raise UserError(f"row {index + 1}: expected text, got {type(context).__name__}", "columns.context")
    try:
        return with_context(prompt, "", context)
    except UserError as error:
        raise UserError(f"row {index + 1}: {error.message}", "columns.context") from None


def _completion(value: Any, chat: bool, index: int) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}] if chat else value
    if not chat or not _is_messages(value):
        raise UserError(f"row {index + 1}: expected text, got {type(value).__name__}", "columns.completion")
    return list(value)


def _answer(value: Any, config: DataConfig, index: int) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"row {index + 1}: expected text or a number, got {type(value).__name__}", "columns.answer")
    text = str(value)
    if config.answer_after is None:
        return text
    _, marker, answer = text.rpartition(config.answer_after)
    if not marker or not answer.strip():
        raise UserError(f"row {index + 1} has nothing after {config.answer_after!r}: {text[-40:]!r}", "answer_after")
    return answer.strip()


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and {"role", "content"} <= item.keys() for item in value
    )
