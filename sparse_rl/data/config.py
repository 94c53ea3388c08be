"""Configuration of a dataset: the `data:` block of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from sparse_rl.config import (
    Configuration,
    NonNegativeInt,
    PathText,
    PositiveInt,
    Probability,
    Rule,
    Text,
    at_most,
    show,
)
from sparse_rl.errors import UserError, did_you_mean

LOCAL_FILES = (".jsonl", ".json", ".parquet", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz")
COLUMNS = ("prompt", "answer", "completion", "context", "tests", "starter_code")
OF_TRACES = ("traces", "split", "limit", "shuffle_seed", "max_prompt_tokens")  # keys for recorded rollouts
BOUNDS = ("from", "until")  # of a condition in `where`
MOST_CHOICES = 26  # letters of the alphabet
TASK_KEYS = {
    "running_sum": ("n", "digits", "note_probability"),
    "retrieval": ("facts", "restated", "filler"),
    "one_liners": ("cases", "note_probability"),
    "look_ups": ("lookups", "note_probability"),
}


def file_kind(name: str) -> str:
    return PurePosixPath(name.lower().removesuffix(".gz")).suffix[1:].removesuffix("l")


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig(Configuration):
    """Problems generated on the fly. The three splits never share a problem.

    task : running_sum has the keys n, digits and note_probability; retrieval has the keys facts, restated and filler;
        one_liners has the keys cases and note_probability; look_ups, which needs the environment
        sparse_rl.data.synthetic:LookUpTable, has the keys lookups and note_probability (sparse_rl/data/synthetic.py)
    size : number of problems
    split, seed : which of the three splits, and the seed from which its problems are drawn
    n : number of digits in a problem
    digits : digits are below this number
    note_probability : probability of a note before a line of a worked answer
    facts : number of facts in a document, which is the context of its question
    restated : number of times that a document states each fact
    filler : number of filler words after each statement
    cases : number of cases of a hidden function
    lookups : number of look-ups in a chain
    """

    task: Literal["running_sum", "retrieval", "one_liners", "look_ups"]
    size: Annotated[PositiveInt, at_most(1_000_000)]
    split: Literal["train", "calibration", "evaluation"] = "train"
    seed: NonNegativeInt = 0
    n: Annotated[int, Rule("from 1 to 12", lambda v: 1 <= v <= 12)] = 8
    digits: Annotated[int, Rule("from 2 to 10", lambda v: 2 <= v <= 10)] = 5
    note_probability: Probability = 0.3
    facts: Annotated[int, Rule("from 1 to 100", lambda v: 1 <= v <= 100)] = 50
    restated: Annotated[PositiveInt, at_most(1000)] = 7
    filler: Annotated[NonNegativeInt, at_most(1000)] = 2
    cases: Annotated[int, Rule("from 1 to 6", lambda v: 1 <= v <= 6)] = 4
    lookups: Annotated[int, Rule("from 1 to 7", lambda v: 1 <= v <= 7)] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for task, keys in TASK_KEYS.items():
            for key in keys:
                if key not in TASK_KEYS[self.task] and getattr(self, key) != getattr(type(self), key):
                    raise UserError(f"is a key of the task {task}; remove {key}", key)


@dataclass(frozen=True, kw_only=True)
class DataConfig(Configuration):
    """One dataset: its source, the columns to use, and the conversion of a problem to a prompt.

    split : split of the dataset, or a slice of it, such as train[:100]
    path : a .jsonl, .json, .csv (also .gz) or .parquet file, or a dataset on the hub (with `subset` and `split`). All
        fields of a CSV file are text
    subset : name of a subset of a dataset on the hub
    traces : folders that `sparse-rl rollout` has written, instead of a path. Kinds grpo, distill and sft train on their
        completions under the recorded evictions, and sample nothing. A slice in `split` counts problems
    synthetic : generated problems, instead of a path
    files : names of files of a dataset on the hub, which are read instead of the dataset's table
    release : name of a release of a task in recipes/tasks that has several; stands for the release's `files`
    where : column of the dataset -> the value, the list of values, or the bounds {from: 2024-08-01, until: 2025-02-01}
        that a row must have; both bounds are included. Rows that do not meet all conditions are left out
    columns : our column name (prompt, answer, completion, context, tests, starter_code) -> the dataset's, as in
        {prompt: problem}. A context is a text that many problems share; the user's message begins with the context, and
        the prompt follows. Tests are passed on to the reward code. With starter code, an instruction to complete this
        code or, where it is empty, to write a program follows the problem
    choices : the 2 to 26 columns with the options of a multiple-choice question, the right option's column first. The
        options follow the problem as lines "A) ...", and the answer is the letter of the right option
    choices_seed : seed of the order of the options; the order depends only on this seed and on the problem's text
    answer_after : keep only the text after the last occurrence of this marker in the answer ("####" for GSM8K's files)
    prompt_template : text in which {prompt} stands for the problem with its options; other braces, as in \\boxed{}, are
        not changed; a context is put before it
    system_prompt : system message before the user's message
    chat : use the tokenizer's chat template; by default true if there is one
    thinking : passed to the chat template as enable_thinking
    limit : maximum number of problems, taken after shuffling (shuffle_seed) and dropping (max_prompt_tokens)
    shuffle_seed : seed of the order of the problems; None keeps the order of the source
    max_prompt_tokens : prompts with more tokens are dropped, and their number is logged
    on_bad_row : stop ends the command at the first row that cannot be used, for example because the chat template
        refuses its prompt; drop leaves such rows out, and their number and the first reasons are logged
    """

    path: PathText | None = None
    split: Text = "train"
    subset: str | None = None
    traces: list[PathText] | None = None
    synthetic: SyntheticConfig | None = None
    files: list[Text] | None = None
    release: Text | None = None
    where: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Text] = field(default_factory=dict)
    choices: list[Text] | None = None
    choices_seed: NonNegativeInt = 0
    answer_after: Text | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    chat: bool | None = None
    thinking: bool | None = None
    limit: PositiveInt | None = None
    max_prompt_tokens: PositiveInt | None = None
    shuffle_seed: NonNegativeInt | None = None
    on_bad_row: Literal["stop", "drop"] = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.traces is not None:
            self._check_traces()
        elif (self.path is None) == (self.synthetic is None):
            raise UserError("give either path (a file or a hub name) or a synthetic block", "path")
        for name in self.columns:
            if name not in COLUMNS:
                mend = f"columns maps our {', '.join(COLUMNS)} to your column names"
                raise UserError(f"unknown column{did_you_mean(name, COLUMNS)}; {mend}", f"columns.{name}")
        if self.synthetic is not None:
            for key in ("columns", "subset", "choices", "answer_after", "files", "where"):
                if getattr(self, key):
                    raise UserError(f"has no effect on a synthetic dataset; remove {key}", key)
            if self.split != "train":
                raise UserError("name the split of a synthetic dataset in synthetic.split", "split")
        if (self.local or self.traces) and not self.split.startswith("train"):
            raise UserError("a local file has only the split train; name it, or a slice such as train[:100]", "split")
        self._check_files()
        self._check_conditions()
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise UserError("must contain {prompt}, where the problem goes", "prompt_template")
        if self.chat is False:
            for key in ("system_prompt", "thinking"):
                if getattr(self, key) is not None:
                    raise UserError(f"has no effect with chat: false; remove {key}, or use prompt_template", key)
        self._check_choices()

    def _check_traces(self) -> None:
        if not self.traces:
            raise UserError("name at least one folder that sparse-rl rollout has written", "traces")
        if len({Path(folder).resolve() for folder in self.traces}) < len(self.traces):
            raise UserError("name each folder once", "traces")
        for key in (f.name for f in fields(self) if f.name not in OF_TRACES):
            if getattr(self, key) not in (None, 0, {}, "stop"):
                raise UserError(f"has no effect on recorded rollouts; remove {key}, or traces", key)

    def _check_files(self) -> None:
        for key in ("release", "files"):
            if getattr(self, key) is not None and self.local:
                raise UserError("is for a dataset on the hub, but path is a local file; remove this key", key)
        if self.release is not None and self.files is None:
            raise UserError("only datasets on the hub of a task in recipes/tasks have releases", "release")
        if self.files is None:
            return
        if len(set(map(file_kind, self.files))) != 1 or not all(file.endswith(LOCAL_FILES) for file in self.files):
            wrong = f"name files with one of the suffixes {', '.join(LOCAL_FILES)}; got {show(self.files)}"
            raise UserError(wrong, "files")

    def _check_conditions(self) -> None:
        for column, condition in self.where.items():
            if bounds := isinstance(condition, Mapping):
                values = list(condition.values())
            else:
                values = condition if isinstance(condition, list) else [condition]
            has_bounds_alone = not bounds or set(condition) <= set(BOUNDS)
            if not has_bounds_alone or not values or not all(isinstance(value, str | int | float) for value in values):
                message = f"give a value, a list of values, or {{from: ..., until: ...}}, got {show(condition)}"
                raise UserError(message, f"where.{column}")

    def _check_choices(self) -> None:
        if self.choices is None:
            if self.choices_seed:
                raise UserError("has no effect without choices; remove choices_seed", "choices_seed")
            return
        if not 2 <= len(set(self.choices)) == len(self.choices) <= MOST_CHOICES:
            message = f"name 2 to {MOST_CHOICES} different columns, the right option's first; got {show(self.choices)}"
            raise UserError(message, "choices")
        for key, value in (("columns.answer", self.columns.get("answer")), ("answer_after", self.answer_after)):
            if value is not None:
                raise UserError(f"has no effect with choices, where the answer is a letter; remove {key}", key)

    @property
    def has_context(self) -> bool:
        return "context" in self.columns or (self.synthetic is not None and self.synthetic.task == "retrieval")

    @property
    def local(self) -> bool:
        return self.path is not None and self.path.lower().endswith(LOCAL_FILES)
