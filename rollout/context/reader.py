"""The model as a compaction uses it: it reads a context, writes about it, and moves keys to other positions.

The requests for conversations of self-study, questions and summaries (Attention Matching, sections 3.1 and 4.4,
appendices B.3 and C.4) are in our own words.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from rollout.context.cache import Context, LayerwiseView, cache_after
from rollout.context.config import PromptCacheConfig
from sparse_rl.attention.families import global_layers, ropes, windows_of
from sparse_rl.attention.views import CacheMap
from sparse_rl.data.tokens import split_prompt, with_context
from sparse_rl.errors import UserError
from sparse_rl.models.weights import Identity
from sparse_rl.policies.cache import Cache

REPEAT = "Write down the text above once more, word for word and from beginning to end, and nothing else."
REQUESTS = (
    "Summarize the text above. Say what it is about, then go through it from beginning to end, and leave out no "
    "person, fact or figure that a reader may want to look up later.",
    "Write down all that the text above says as one JSON object. Choose keys that fit its content, nest what belongs "
    "together, copy names, numbers and dates exactly, and write nothing but the JSON.",
    "Gather facts that stand far apart in the text above and bring them together: list everything that it says about "
    "each of its main subjects, compare these with each other, count or add up what can be counted, and say what "
    "follows that no single passage says.",
)
QUESTIONS = (
    "Ask three questions that test how well somebody has understood the text above, each about another part of it. "
    "Write one question in each line, without numbers and without answers, and nothing else."
)
MOST_QUESTIONS = 3
SUMMARIES = {
    "plain": "Summarize the text above.",
    "detailed": "Summarize the text above in detail.",
    "for_questions": "Summarize the text above. Keep every point that somebody may need to answer questions about it.",
    "concise": "Summarize the text above concisely.",
    "shortest": "Summarize the text above in as few words as possible.",
}
MARKER = re.compile(r"^\s*(?:[Qq]?\d{1,2}\s*[.):]|[-*•])\s+")  # of an item in a list


@dataclass(frozen=True)
class ContextPrompts:
    """Prompts about a context, each as the token ids that follow the context's tokens.

    repeat : the instruction to repeat the context; if empty, the repetition directly follows the context
    requests : the conversation starters of self-study that are the same for all contexts
    questions : the instruction to write questions about the context; if empty, there are none
    starters : function (token ids of the answer to `questions`) -> token ids of the conversation starters, one for each
        question in the answer
    summaries : name of a kind of summary -> the request for it
    text : function (token ids of summaries) -> token ids of their text, which takes the context's place
    """

    repeat: Sequence[int] = ()
    requests: Sequence[Sequence[int]] = ()
    questions: Sequence[int] = ()
    starters: Callable[[Sequence[int]], list[list[int]]] = lambda answer: []
    summaries: Mapping[str, Sequence[int]] = field(default_factory=dict)
    text: Callable[[Sequence[Sequence[int]]], list[int]] = lambda answers: list(chain(*answers))

    @classmethod
    def of(cls, tokenizer: Any, follow: Callable[[str], list[int]], chat: bool = True) -> ContextPrompts:
        """Return the prompts for a model with this tokenizer.

        follow : function text -> the token ids after the context's in a user's turn of the context and this text
        chat : False for plain text without turns, in which a repetition directly follows the context
        """
        questions = follow(f"\n\n{QUESTIONS}")

        def decoded(answer: Sequence[int]) -> str:
            text, turn = (tokenizer.decode(list(x), skip_special_tokens=True) for x in (answer, questions))
            begun = "<think>" in turn and "</think>" not in turn  # by the chat template
            return after_thinking(f"<think>{text}" if begun else text)

        def starters(answer: Sequence[int]) -> list[list[int]]:
            return [follow(f"\n\n{question}") for question in questions_in(decoded(answer))]

        def text(answers: Sequence[Sequence[int]]) -> list[int]:
            joined = "\n\n".join(filter(None, (decoded(answer).strip() for answer in answers)))
            return list(tokenizer.encode(joined, add_special_tokens=False))

        return cls(
            follow(f"\n\n{REPEAT}") if chat else (),
            [follow(f"\n\n{request}") for request in REQUESTS],
            questions,
            starters,
            {name: follow(f"\n\n{request}") for name, request in SUMMARIES.items()},
            text,
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any], tokenizer: Any) -> ContextPrompts:
        """Return the prompts about contexts for a dataset with a row like this one, of `prompt` and `context`.

        A prompt about a context is the end of a user's turn that begins with the context. The model answers it without
        thinking, if its chat template can switch this off.
        """
        prompt, context = row["prompt"], row["context"]

        def follow(text: str) -> list[int]:
            return split_prompt(with_context(prompt, context, context, text), context, tokenizer, thinking=False).rest

        return cls.of(tokenizer, follow, not isinstance(prompt, str))


def after_thinking(text: str) -> str:
    """Return the text after a model's thinking, which ends with </think>. It is empty if the thinking did not end."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def questions_in(text: str) -> list[str]:
    """Return the first three questions of a text with one question in each line, without the markers of a list.

    Lines without a question mark count only if no line has one.
    """
    lines = [MARKER.sub("", line).strip(" \t*") for line in text.splitlines()]
    lines = [line for line in lines if any(character.isalnum() for character in line)]
    return ([line for line in lines if "?" in line] or lines)[:MOST_QUESTIONS]


# ---- the model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """The functions of an `HFEngine` that a compaction needs, and prompts about contexts."""

    engine: Any
    prompts: ContextPrompts

    @property
    def model(self) -> Identity:
        identity: Identity = self.engine.identity
        return identity

    @property
    def group(self) -> int:
        """G, the number of query heads per kv head."""
        config = self.engine.model.config
        return int(config.num_attention_heads // config.num_key_value_heads)

    def cache(self, context: Context | None, captures: bool = False) -> CacheMap:
        return cache_after(context, windows_of(self.engine.model.config), captures)

    def read(self, texts: Sequence[Sequence[int]], cache: Cache) -> None:
        self.engine._read([list(text) for text in texts], cache)

    def logits(self, texts: Sequence[Sequence[int]], cache: Cache) -> list[Tensor]:
        """Run texts through the model, as rows of a batch, with a cache. Returns the logits of each text, [length, V],
        in the autograd graph if the cache's entries are.
        """
        engine, longest = self.engine, max(map(len, texts))
        device = next(engine.model.parameters()).device
        ids = torch.tensor([[*text, *[text[-1]] * (longest - len(text))] for text in texts], device=device)
        cache.begin_prefill([len(text) for text in texts], device)
        places = torch.arange(longest, device=device)[None] + cache.past
        hidden = engine._hidden(ids, places, cache)
        logits = engine._logits(hidden.flatten(0, 1)).view(*ids.shape, -1)
        return [row[: len(text)] for row, text in zip(logits, texts, strict=True)]

    def read_layerwise(self, view: LayerwiseView) -> None:
        device = next(self.engine.model.parameters()).device
        ids, positions = (torch.tensor([x], device=device) for x in (view.ids, view.positions))
        with self.engine._sampling():
            self.engine._hidden(ids, positions, view)

    def write(
        self, context: Context, prompts: Sequence[Sequence[int]], most_tokens: int, samples: int, seed: int
    ) -> list[list[int]]:
        """Return the token ids of the model's answers to prompts after a context, `samples` for each prompt."""
        sampling = SamplingConfig(most_tokens, n=samples, seed=seed)
        return [rollout.completion_ids for rollout in self.engine.generate(prompts, sampling, context)]

    def query_norm(self, layer: int) -> Tensor | None:
        """Return the weights [D] of the layer's query norm, or None if the model has no query norm of each head."""
        model = self.engine.model
        attention = model.get_decoder().layers[global_layers(model.config)[layer]].self_attn
        weight = getattr(getattr(attention, "q_norm", None), "weight", None)
        return weight if weight is not None and weight.numel() == attention.head_dim else None


class Stages(dict[str, float]):
    """Duration of each stage of a compaction, in seconds, added up over parts."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # otherwise kernels that are still running would count for the next stage
        self[stage] = self.get(stage, 0.0) + time.perf_counter() - start


# ---- what it writes about a context ---------------------------------------------------------------------------------


class Conversation(NamedTuple):
    """A conversation of self-study: the token ids of its starter, and of the answer to it."""

    starter: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        return [*self.starter, *self.answer]


def conversations(context: Context, config: PromptCacheConfig, reader: Reader) -> list[Conversation]:
    """Return the conversations of self-study after a context: `config.study_samples` answers to each fixed request, and
    to each question that the model writes.
    """
    starters = [*reader.prompts.requests, *_questions(context, config, reader)]
    if not starters:
        raise UserError("self_study needs prompts that ask about the context", "queries")
    samples = config.study_samples
    answers = reader.write(context, starters, config.study_tokens, samples, config.seed)
    return [Conversation(list(starters[number // samples]), answer) for number, answer in enumerate(answers)]


def question(context: Context, config: PromptCacheConfig, reader: Reader) -> list[int]:
    questions = _questions(context, config, reader)
    if not questions:
        wrong = f"the model wrote no question about the context within {config.study_tokens} tokens"
        raise UserError(f"{wrong}; raise study_tokens, or use queries: [window]", "queries")
    return questions[0]


def _questions(context: Context, config: PromptCacheConfig, reader: Reader) -> list[list[int]]:
    if not reader.prompts.questions:
        return []
    (answer,) = reader.write(context, [reader.prompts.questions], config.study_tokens, 1, config.seed)
    return reader.prompts.starters(answer)


def summarized(tokens: list[int], config: PromptCacheConfig, reader: Reader) -> tuple[list[int], PromptCacheConfig]:
    """Replace a context by a summary that the model writes. Returns the new context's tokens, and settings for it.

    The first `config.first` and the last `config.last` tokens stay. If `config.chunks` is set, the parts between them
    are summarized one by one, each read alone between the first and the last tokens.
    """
    assert config.summary is not None
    request = reader.prompts.summaries.get(config.summary)
    if request is None:
        raise UserError("summaries need prompts that ask for them", "summary")
    whole = replace(config, chunk=len(tokens)) if config.chunks is None else config
    first, last = tokens[: config.first], tokens[len(tokens) - config.last :]
    inner, summaries = tokens[config.first : len(tokens) - config.last], []
    for part in whole.parts(len(tokens)):
        cache = reader.cache(None)
        text = [*first, *inner[part.start : part.end], *last]
        reader.read([text], cache)
        read = cache.of_policy.as_context(text, cache.of_windows)
        summaries += reader.write(read, [request], config.summary_tokens, 1, config.seed)
    summary = reader.prompts.text(summaries)
    if not summary:
        wrong = f"the model wrote no summary within {config.summary_tokens} tokens"
        raise UserError(f"{wrong}; raise summary_tokens", "summary")
    return [*first, *summary, *last], replace(config, summary=None, chunks=None)


# ---- keys that move to another position (Attention Matching, appendix C.3) ------------------------------------------

# Kinds of RoPE whose frequencies do not depend on the length of the text. yarn also scales cosines and sines.
FIXED = {"default", "linear", "llama3", "yarn"}

UNMOVABLE = {
    "glm4": "the model's RoPE turns neighbouring dimensions of a key together",
    "ministral3": "the model's queries are multiplied by a factor that grows with the position",
}


def check_movable(config: Any, key: str = "chunking") -> None:
    """Raise UserError, about the setting `key`, if keys of a model cannot be moved to other positions."""
    rope, *others = ropes(config)
    kind, why = rope.get("rope_type", "default"), UNMOVABLE.get(config.model_type)
    if others or any(windows_of(config)):
        why = "the model has layers with sliding windows or several kinds of RoPE"
    elif not why and (
        rope.get("partial_rotary_factor", 1.0) != 1.0 or not all(getattr(config, "no_rope_layers", None) or [1])
    ):
        why = "RoPE turns only a part of the model's keys"
    elif not why and kind not in FIXED:
        why = f"the model's RoPE of type {kind} depends on the length of the text"
    if why:
        raise UserError(f"{why}, so keys cannot be moved; use chunking: kv", key)


def moved(rotary: Any, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Return keys [1, Hkv, N, D], which RoPE has turned to the positions `old`, turned to the positions `new`, int64
    [1, Hkv, N] each.

    The angle is the difference between the angles of both positions, each rounded to float32 as in the model. The angle
    of the difference of positions would differ from it by this rounding.
    """
    dummy = torch.empty(0, dtype=torch.float32, device=keys.device)
    (cos, sin), (new_cos, new_sin) = (
        [x.double()[None] / rotary.attention_scaling for x in rotary(dummy, positions[0])] for positions in (old, new)
    )
    turn_cos, turn_sin = new_cos * cos + new_sin * sin, new_sin * cos - new_cos * sin
    wide = keys.double()
    lower, upper = wide.chunk(2, dim=-1)
    turned = wide * turn_cos + torch.cat([-upper, lower], dim=-1) * turn_sin
    return turned.to(keys.dtype)
