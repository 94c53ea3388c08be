"""Token sequences for training: from the rows of a dataset to the rows of a forward pass under recorded evictions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rollout.engine import Rollout
from rollout.recorded import TOKENS, place_of
from sparse_rl.attention.families import cache_shape, windows_of
from sparse_rl.attention.interface import NO_MASK, KVView
from sparse_rl.attention.views import make_view
from sparse_rl.data.tokens import SplitPrompt, completion_ids, prompt_ends, prompt_ids, split_prompt
from sparse_rl.errors import UserError
from sparse_rl.models.load import base_of
from sparse_rl.trace import EvictionTrace, pack_traces

logger = logging.getLogger("sparse_rl")


@dataclass(frozen=True)
class Example:
    """One training sequence, as token ids.

    completion : tokens that the student learns; empty if the student will sample them
    trace : eviction trace of prompt + completion; None before an engine has sampled or simulated the sequence
    place : place of a recorded trace, which is read when it is used (`RecordedRollouts.trace`); None without a record
    context, first : number of the prompt's tokens up to the end of the context that an engine compacts, 0 without one,
        and of those before the context's text
    """

    prompt: list[int]
    completion: list[int]
    trace: EvictionTrace | None = None
    place: tuple[str, int, str] | None = None
    context: int = 0
    first: int = 0

    @classmethod
    def from_rollout(cls, rollout: Rollout) -> Example:
        return cls(rollout.prompt_ids, rollout.completion_ids, rollout.trace)

    @property
    def split(self) -> SplitPrompt:
        return SplitPrompt(self.prompt[: self.context], self.first, self.prompt[self.context :])

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


def prompt_examples(data: Any, tokenizer: Any, thinking: bool | None, contexts: bool = False) -> list[Example]:
    """Return the prompts of rows. contexts : True if each begins with the row's context, which an engine compacts"""
    if not contexts:
        return [Example(prompt_ids(prompt, tokenizer, thinking), []) for prompt in data["prompt"]]
    pairs = zip(data["prompt"], data["context"], strict=True)
    splits = [split_prompt(prompt, context, tokenizer, thinking) for prompt, context in pairs]
    return [Example([*s.context, *s.rest], [], context=len(s.context), first=s.first) for s in splits]


def accepted(
    data: Any, reward: Callable[..., Any], least: float, where: str, tokenizer: Any, thinking: bool | None
) -> Any:
    """Return the rows whose completion has a reward of at least `least`, and log their number."""
    kept: list[int] = []
    for start in range(0, len(data), 256):
        part = data[start : start + 256]
        columns = {name: values for name, values in part.items() if name not in ("prompt", "completion", *TOKENS)}
        recorded = part["prompt_ids"] if TOKENS.keys() <= part.keys() else None
        if recorded:
            columns["reward"] = [sample["reward"] for (sample,) in part["samples"]]
        ids = recorded or [prompt_ids(prompt, tokenizer, thinking) for prompt in part["prompt"]]
        ends = prompt_ends(ids, tokenizer)
        scores = reward(prompts=part["prompt"], prompt_ends=ends, completions=part["completion"], **columns)
        kept += [start + i for i, score in enumerate(scores) if score is not None and score >= least]
    logger.warning("%s: %d of %d completions score >= %s", where, len(kept), len(data), least)
    return data.select(kept)


def completed_examples(
    data: Any,
    tokenizer: Any,
    thinking: bool | None,
    *,
    max_length: int,
    max_completion_length: int,
    truncate: bool,
    where: str,
    contexts: bool = False,
) -> list[Example]:
    """Return prompts with their completions as examples, and log the numbers of truncated and dropped sequences.

    max_length : maximum number of tokens in prompt and completion
    truncate : True truncates an overlong completion if at least one token of it fits; False drops the sequence
    contexts : see `prompt_examples`
    """
    examples = _tokenised(data, tokenizer, thinking, where, contexts)
    kept: list[Example] = []
    cut = 0
    for example in examples:
        room = min(max_completion_length, max_length - len(example.prompt))
        if len(example.completion) <= room:
            kept.append(example)
        elif truncate and room > 0:
            kept.append(replace(example, completion=example.completion[:room]))
            cut += 1
    if cut or len(kept) < len(examples):
        dropped, line = len(examples) - len(kept), "%s: %d of %d sequences are too long: %d are truncated, %d dropped"
        logger.warning(line, where, cut + dropped, len(examples), cut, dropped)
    if not kept:
        raise UserError("no sequence is left; change keep, max_completion_length or max_length", where)
    return kept


def recorded_examples(
    rows: Any, *, max_length: int, max_completion_length: int, truncate: bool, where: str
) -> list[Example]:
    """Return the rows of `recorded_rows` as examples, and log the number of sequences that are dropped as too long.

    truncate : True raises UserError if a sequence is too long, because a record cannot be cut
    """
    examples = []
    for row in rows:
        (sample,) = row["samples"]
        examples.append(Example(row["prompt_ids"], sample["completion_ids"], place=place_of(sample)))
    kept = [e for e in examples if e.length <= max_length and len(e.completion) <= max_completion_length]
    if dropped := len(examples) - len(kept):
        if truncate:
            wrong = f"{dropped} of {len(examples)} recorded sequences are too long, and a record cannot be cut"
            raise UserError(f"{wrong}; set drop, or raise max_completion_length and max_length", "overlong")
        logger.warning("%s: %d of %d recorded sequences are too long and dropped", where, dropped, len(examples))
    if not kept:
        raise UserError("no sequence is left; change keep, max_completion_length or max_length", where)
    return kept


def text_examples(
    data: Any, tokenizer: Any, thinking: bool | None, *, max_length: int, packing: bool, where: str
) -> list[Example]:
    """Return the texts of at most `max_length` tokens as examples, and log the number of longer ones. With `packing`,
    the texts are joined and cut into examples of `max_length` tokens."""
    texts = _tokenised(data, tokenizer, thinking, where)
    kept = [text for text in texts if text.prompt and text.length <= max_length]
    if len(kept) < len(texts):
        logger.warning("%s: %d of %d texts are too long and dropped", where, len(texts) - len(kept), len(texts))
    if not kept:
        raise UserError(f"no text of at most {max_length} tokens is left; raise max_length", where)
    if not packing:
        return kept
    stream = [token for text in kept for token in (*text.prompt, *text.completion)]
    parts = [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    return [Example(part[:1], part[1:]) for part in parts if len(part) > 1]


def _tokenised(data: Any, tokenizer: Any, thinking: bool | None, where: str, contexts: bool = False) -> list[Example]:
    try:
        pairs = zip(prompt_examples(data, tokenizer, thinking, contexts), data["completion"], strict=True)
        return [replace(prompt, completion=completion_ids(text, tokenizer)) for prompt, text in pairs]
    except UserError as error:
        raise UserError(error.message, where) from error


@dataclass
class Batch:
    """A batch of sequences as right-padded rows. With packing, a row holds several sequences.

    In the shapes, B is the number of rows, S the length of the longest row, and N the number of completion tokens.

    ids, positions : token ids, and position of each token in its sequence, from 0, int64 [B, S]
    where : (rows, columns) of the positions at which the model predicts the completion tokens, int64 [N] each
    targets : completion tokens, int64 [N]
    rows : the sequences that each row holds
    through : True lets gradients flow into the fits of policy am; False treats the fits as constants
    """

    ids: Tensor
    positions: Tensor
    where: tuple[Tensor, Tensor]
    targets: Tensor
    rows: list[list[Example]]
    attention_kernel: str = "gather"
    through: bool = True

    @classmethod
    def make(
        cls,
        examples: Sequence[Example],
        device: torch.device,
        packing: bool = False,
        attention_kernel: str = "gather",
        through: bool = True,
    ) -> Batch:
        rows = _packed(examples) if packing else [[example] for example in examples]

        def padded(of: Callable[[Example], Tensor]) -> Tensor:
            joined = [torch.cat([of(sequence) for sequence in row]) for row in rows]
            return pad_sequence(joined, batch_first=True).to(device)

        def predicts(sequence: Example) -> Tensor:
            following = torch.arange(1, sequence.length + 1)
            return (following >= len(sequence.prompt)) & (following < sequence.length)

        ids = padded(lambda sequence: torch.tensor([*sequence.prompt, *sequence.completion]))
        positions = padded(lambda sequence: torch.arange(sequence.length))
        row, column = padded(predicts).nonzero(as_tuple=True)
        return cls(ids, positions, (row, column), ids[row, column + 1], rows, attention_kernel, through)

    @property
    def examples(self) -> list[Example]:
        return [example for row in self.rows for example in row]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of tokens of the rows and of their prompts, int64 [B] each. Rows must not be packed."""
        rows = [(example.length, len(example.prompt)) for (example,) in self.rows]
        lengths, prompts = torch.tensor(rows, device=self.ids.device).T
        return lengths, prompts

    def hidden(self, model: Any, *, replayed: bool) -> Tensor:
        """Return the model's last hidden states at the positions that predict the targets, [N, hidden size].

        replayed : True replays the traces; False gives each sequence a full cache
        """
        if replayed:
            traces = [[trace_of(example) for example in row] for row in self.rows]
        else:
            config = base_of(model).config
            (layers, kv_heads, _), windows = cache_shape(config), windows_of(config)
            traces = [[EvictionTrace.dense(layers, kv_heads, e.length, windows) for e in row] for row in self.rows]
        packed, starts = [pack_traces(row) for row in traces], [0] * len(traces)
        view = make_view(packed, starts, self.ids.shape[1], self.ids.device, self.attention_kernel, self.through)
        return self.hidden_under(model, view)

    def hidden_under(self, model: Any, view: KVView) -> Tensor:
        """Return the last hidden states under `view` at the positions that predict the targets, [N, hidden size]."""
        inputs = {"input_ids": self.ids, "position_ids": self.positions, "attention_mask": NO_MASK.to(self.ids.device)}
        out = base_of(model).get_decoder()(**inputs, kv_view=view, use_cache=False)
        return out.last_hidden_state[self.where]


def trace_of(example: Example) -> EvictionTrace:
    assert example.trace is not None, "the example has no trace to replay: no engine has sampled or simulated it"
    return example.trace


def _packed(examples: Sequence[Example]) -> list[list[Example]]:
    """Pack the sequences, longest first, each into the first row with enough room. The longest fills a row."""
    width = max(example.length for example in examples)
    rows: list[list[Example]] = []
    for example in sorted(examples, key=lambda sequence: -sequence.length):
        fits = (row for row in rows if sum(other.length for other in row) + example.length <= width)
        if (row := next(fits, None)) is None:
            rows.append(row := [])
        row.append(example)
    return rows
