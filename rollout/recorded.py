"""Recorded rollouts as training data: the rows of a dataset, and the rollouts of these rows in place of an engine.

Nothing is sampled, simulated or tokenized here: token ids, log-probs and evictions are those of the folders that
`sparse-rl rollout` has written (files.py). A row of the dataset holds samples of one problem. It says where their
traces are, with the hashes of the files, so the fingerprint of the rows covers the traces. A trace is read when it is
used.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, Value

from rollout.config import COMPLETIONS, Origin, SamplingConfig, read_origin
from rollout.engine import Rollout
from rollout.files import RolloutFiles
from rollout.verify import check_model
from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.attention.views import make_view
from sparse_rl.data.config import DataConfig
from sparse_rl.data.source import slice_rows, table
from sparse_rl.errors import UserError
from sparse_rl.models.weights import weights_digest
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import fingerprint
from sparse_rl.progress import stage
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.files import read_row, stored_hash

logger = logging.getLogger("sparse_rl")
OF_ONE = ("completion", "reward", "tokens", "retention", "mean_logprob")  # keys of a line that differ between samples
TOKENS = Features({
    "prompt_ids": [Value("int32")],
    "samples": [{
        "completion_ids": [Value("int32")],
        "logprobs": [Value("float32")],
        "model_logprobs": [Value("float32")],
        "finish_reason": Value("string"),
        "reward": Value("float64"),
        "file": Value("string"),
        "row": Value("int64"),
        "sha256": Value("string"),
    }],
})  # fmt: skip
Row = Mapping[str, Any]


# ---- the rows of a dataset ------------------------------------------------------------------------------------------


def recorded_rows(data: DataConfig, config: Any, tokenizer: Any, samples: int = 1) -> datasets.Dataset:
    """Return the rollouts of the folders `data.traces` as rows, after a check of all files.

    config, tokenizer : configuration and tokenizer of the model to train
    samples : number of samples of one problem in each row; 1 adds the column `completion`

    The columns are `prompt_ids`, `samples` (TOKENS), `prompt`, and the further keys of the lines. Raises UserError for
    files that are incomplete or damaged, or that another tokenizer wrote, and for traces that no view replays.
    """
    problems: list[list[dict[str, Any]]] = []
    with stage("reading", "recorded rollouts", total=len(data.traces or ())) as progress:
        for folder in data.traces or ():
            problems += _problems(Path(folder), config, tokenizer, samples)
            progress.advance()
    problems = slice_rows({"train": problems}, data)
    if data.shuffle_seed is not None:
        random.Random(data.shuffle_seed).shuffle(problems)
    if data.max_prompt_tokens is not None:
        kept = [lines for lines in problems if len(lines[0]["prompt_ids"]) <= data.max_prompt_tokens]
        if len(kept) < len(problems):
            dropped = len(problems) - len(kept)
            logger.warning("dropped %d prompts longer than %d tokens", dropped, data.max_prompt_tokens)
        problems = kept
    groups = [lines[i : i + samples] for lines in problems[: data.limit] for i in range(0, len(lines), samples)]
    if not groups:
        raise UserError("no problem is left; raise max_prompt_tokens, or change split")
    names = dict.fromkeys(name for group in groups for name in group[0]["texts"])
    texts = table({name: [group[0]["texts"].get(name) for group in groups] for name in names if name not in TOKENS})
    ids = [{"prompt_ids": group[0]["prompt_ids"], "samples": [line["sample"] for line in group]} for group in groups]
    return datasets.concatenate_datasets([texts, datasets.Dataset.from_list(ids, features=TOKENS)], axis=1)


def _problems(folder: Path, config: Any, tokenizer: Any, samples: int) -> list[list[dict[str, Any]]]:
    """Return the lines of a folder, problem by problem."""
    origin, lines = read_origin(folder), list[dict[str, Any]]()
    if origin.sampling.n % samples:
        wrong = f"must divide the {origin.sampling.n} recorded samples of a problem in {folder}, got {samples}"
        raise UserError(wrong, "num_generations")
    for part in RolloutFiles(folder, origin).parts(*cache_shape(config)[:2], windows_of(config)):
        if part.line == 1:
            trace = part.rollouts[0].trace
            make_view([trace], [0], len(trace), "cpu", "gather")  # raises UserError if no view replays its sections
        file, sha256 = (str(part.file), stored_hash(part.file)) if origin.has_traces else ("", "")
        texts = tokenizer.batch_decode([r.completion_ids for r in part.rollouts], skip_special_tokens=True)
        for i, (rollout, further, text) in enumerate(zip(part.rollouts, part.further, texts, strict=True)):
            if further.get("completion", text) != text:
                wrong = "this model's tokenizer reads another text in the tokens than the line has"
                raise UserError(f"{folder / COMPLETIONS}, line {part.line + i}: {wrong}; use the sampler's tokenizer")
            if rollout.spans or "conversation" in further:
                wrong = "a conversation of several turns, of which training from recorded rollouts knows nothing"
                raise UserError(f"{folder / COMPLETIONS}, line {part.line + i}: {wrong}; remove it")
            columns = {name: value for name, value in further.items() if name not in OF_ONE}
            prompt = columns.setdefault("prompt", tokenizer.decode(rollout.prompt_ids))
            if samples == 1:
                chat = not isinstance(prompt, str)
                columns["completion"] = [{"role": "assistant", "content": text}] if chat else text
            names = ("completion_ids", "logprobs", "model_logprobs", "finish_reason")
            sample = {name: getattr(rollout, name) for name in names}
            sample |= {"reward": further.get("reward"), "file": file, "row": i, "sha256": sha256}
            lines.append({"prompt_ids": rollout.prompt_ids, "sample": sample, "texts": columns})
    n = origin.sampling.n
    groups = [lines[i : i + n] for i in range(0, len(lines), n)]
    for number, group in enumerate(groups):
        if len(group) < n or any(line["prompt_ids"] != group[0]["prompt_ids"] for line in group):
            wrong = f"the {n} samples of a problem must follow one another, with one prompt; sample again"
            raise UserError(f"{folder / COMPLETIONS}, from line {number * n + 1}: {wrong}")
    for i, line in enumerate(lines):
        first = lines[i - i % samples]["texts"]
        if differ := [name for name, value in line["texts"].items() if first.get(name) != value]:
            wrong = f"key {differ[0]} differs between samples of one problem, but rewards get one value; remove it"
            raise UserError(f"{folder / COMPLETIONS}, line {i + 1}: {wrong}")
    return groups


def check_rows(rows: Any, recorded: bool, samples: int, contexts: bool = False) -> None:
    """Raise UserError unless rows of `recorded_rows`, and no others, are used with RecordedRollouts, and hold as many
    samples of a problem as a group has; and unless rows have a context, if `contexts` are compacted.

    recorded : True if RecordedRollouts take the place of an engine
    """
    names = {*(getattr(rows, "column_names", None) or ())}
    if (TOKENS.keys() <= names) != recorded:
        wrong = "rows of recorded rollouts need RecordedRollouts as the engine, other rows need another"
        raise UserError(wrong, "engine")
    if contexts and "context" not in names:
        raise UserError("needs rows with a column context, which each prompt begins with", "prompt_cache")
    if recorded and len(rows[0]["samples"]) != samples:
        wrong = f"is {samples}, but a row holds {len(rows[0]['samples'])} recorded samples; set the same number"
        raise UserError(wrong, "num_generations")


# ---- the rollouts of the rows ---------------------------------------------------------------------------------------


class RecordedRollouts:
    """Hands out the rollouts of rows of `recorded_rows`. A trainer holds it in place of an engine.

    folders : names of the folders, which are only compared with the model here
    model, config : directory or hub name of the model to train, and its configuration
    policy : cache policy of the recipe, which replay does not need

    Raises UserError if a folder was sampled by a model of another shape or vocabulary.

    same_weights : True if the files of weights of all samplers equal the model's, so that the gap before the first
        update is rounding
    same_policy : True if all folders were sampled under `policy`
    dtypes : the dtypes of the samplers
    """

    shares_weights = True

    def __init__(self, folders: Sequence[str], model: str, config: Any, policy: Policy) -> None:
        self.policy, self.config, self.warnings = policy, config, list[str]()
        self.origins = {folder: read_origin(Path(folder)) for folder in folders}
        for folder, origin in self.origins.items():
            try:
                same_config = check_model(origin, config, model)
            except UserError as error:
                raise UserError(f"{folder}: {error.message}") from error
            if not same_config:
                self.warnings.append(f"{folder}: config.json of {model} differs from the sampler's")
        own, under = weights_digest(model), fingerprint(policy)
        differ = [folder for folder, origin in self.origins.items() if origin.weights != own]
        others = [folder for folder, origin in self.origins.items() if origin.made_by.get("policy") != under]
        self.same_weights, self.same_policy = not differ, not others
        self.dtypes = {origin.dtype for origin in self.origins.values()}
        if differ:
            wrong = "not sampled with the files of weights that this model has, so the gap is more than rounding"
            self.warnings.append(f"{', '.join(differ)}: {wrong}")
        if others:
            theirs = ", ".join(sorted({_policy_words(self.origins[folder]) for folder in others}))
            self.warnings.append(f"{', '.join(others)}: recorded under {theirs}; the model is saved with {under}")

    def describe(self) -> str:
        """Return the folders in words."""
        facts = (
            f"{folder}: by {origin.engine} in {origin.dtype}, temperature {origin.sampling.temperature:g}, under "
            f"{_policy_words(origin)}"
            for folder, origin in self.origins.items()
        )
        return "recorded, nothing is sampled; " + "; ".join(facts)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise UserError unless all rollouts were drawn from the distributions that `sampling` describes."""
        for folder, origin in self.origins.items():
            for key in ("temperature", "top_p", "top_k", "min_p"):
                if (theirs := getattr(origin.sampling, key)) != (ours := getattr(sampling, key)):
                    raise UserError(f"is {ours}, but the log-probs of {folder} are at {theirs}; set {theirs}", key)
            if origin.sampling.truncated_support and not origin.sampling.records_support:
                raise UserError(f"{folder} was sampled with a truncated distribution, but records no supports")
            if (longest := origin.sampling.max_tokens) > sampling.max_tokens:
                wrong = f"{folder} was sampled with up to {longest} tokens; set {longest}"
                raise UserError(wrong, "max_completion_length")

    def trace(self, place: tuple[str, int, str], length: int) -> EvictionTrace:
        """Return the trace at a place (file, row, hash of the file); no file means a full cache of `length` tokens."""
        file, row, sha256 = place
        if file:
            return EvictionTrace.from_state(read_row(file, row, sha256))
        layers, kv_heads, _ = cache_shape(self.config)
        return EvictionTrace.dense(layers, kv_heads, length, windows_of(self.config))

    def hand_out(self, rows: Sequence[Row], rank: int) -> tuple[list[dict[str, Any]], list[Rollout]]:
        """Return this process's rows of a generation, without tokens, and a different sample of each row's problem.

        Over the processes in order, each row of the dataset is repeated as often as it has samples. Which sample is
        returned depends on the place alone, so a resumed run gets the same ones.
        """
        plain, rollouts = [], []
        for place, row in enumerate(rows, start=rank * len(rows)):
            sample, prompt = row["samples"][place % len(row["samples"])], row["prompt_ids"]
            trace = self.trace(place_of(sample), len(prompt) + len(sample["completion_ids"]))
            values = {name: sample[name] for name in ("completion_ids", "logprobs", "model_logprobs", "finish_reason")}
            rollouts.append(Rollout(prompt, **values, trace=trace))
            plain.append({**{k: v for k, v in row.items() if k not in TOKENS}, "reward": sample["reward"]})
        return plain, rollouts

    def close(self) -> None:
        """Do nothing: no model and no process is held."""


def place_of(sample: Row) -> tuple[str, int, str]:
    """Return the place of a sample's trace, as `RecordedRollouts.trace` takes it."""
    return sample["file"], sample["row"], sample["sha256"]


def _policy_words(origin: Origin) -> str:
    return origin.made_by.get("policy", "a policy that is not recorded")
