"""Texts that the model writes about a context: conversations of self-study, questions and summaries (Attention
Matching, sections 3.1 and 4.4, appendices B.3 and C.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from rollout.context.cache import Context, ContextCache
from rollout.context.config import PromptCacheConfig
from rollout.context.layerwise import LayerwiseView
from rollout.context.prompts import ContextPrompts
from sparse_rl.errors import UserError
from sparse_rl.models.identity import Identity


class Reader(Protocol):
    """The functions of an engine that a compaction needs.

    prompts : prompts about contexts
    group : G, the number of query heads per kv head
    model : the engine's model
    """

    @property
    def model(self) -> Identity: ...

    @property
    def prompts(self) -> ContextPrompts: ...

    @property
    def group(self) -> int: ...

    def cache(self, context: Context | None, captures: bool = False) -> Any:
        """Return the cache of texts that continue a context, a `ContextCache` (cache.py), or of texts without one."""
        ...

    def read(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> None:
        """Run texts through the model, as rows of a batch, with a cache."""
        ...

    def logits(self, texts: Sequence[Sequence[int]], cache: ContextCache) -> list[Tensor]:
        """Run texts through the model, as rows of a batch, with a cache. Returns the logits of each text, [length, V].

        If the cache's entries are in the autograd graph, so are the logits.
        """
        ...

    def read_layerwise(self, view: LayerwiseView) -> None:
        """Run the tokens `view.ids` at the positions `view.positions` through the model, as one row, with `view`."""
        ...

    def write(
        self, context: Context, prompts: Sequence[Sequence[int]], most_tokens: int, samples: int, seed: int
    ) -> list[list[int]]:
        """Let the model answer prompts after a context. Returns the answers' token ids, `samples` for each prompt.

        most_tokens : maximum number of tokens of an answer
        """
        ...

    def moved(self, keys: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return keys [1, Hkv, N, D], which RoPE has turned to the positions `old`, turned to the positions `new`.

        Positions are int64 [1, Hkv, N]. Raises UserError for models of whose RoPE this is not possible.
        """
        ...

    def query_norm(self, layer: int) -> Tensor | None:
        """Return the weights [D] of the layer's query norm, or None if the model has no query norm of each head."""
        ...


class Conversation(NamedTuple):
    """A conversation of self-study: the token ids of its starter, and of the answer to it."""

    starter: list[int]
    answer: list[int]

    @property
    def tokens(self) -> list[int]:
        """Token ids of the whole conversation."""
        return [*self.starter, *self.answer]


def conversations(context: Context, config: PromptCacheConfig, reader: Reader) -> list[Conversation]:
    """Return the conversations of self-study after a context.

    The starters are fixed requests, and questions that the model writes. Each gets `config.study_samples` answers.

    Raises UserError if there are no starters.
    """
    starters = [*reader.prompts.requests, *_questions(context, config, reader)]
    if not starters:
        raise UserError("self_study needs prompts that ask about the context", "queries")
    samples = config.study_samples
    answers = reader.write(context, starters, config.study_tokens, samples, config.seed)
    return [Conversation(list(starters[number // samples]), answer) for number, answer in enumerate(answers)]


def question(context: Context, config: PromptCacheConfig, reader: Reader) -> list[int]:
    """Return the token ids of a user's turn with one question that the model writes after a context.

    Raises UserError if the model wrote no question.
    """
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

    Raises UserError if the model wrote no summary.
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
        summaries += reader.write(cache.as_context(text), [request], config.summary_tokens, 1, config.seed)
    summary = reader.prompts.text(summaries)
    if not summary:
        wrong = f"the model wrote no summary within {config.summary_tokens} tokens"
        raise UserError(f"{wrong}; raise summary_tokens", "summary")
    return [*first, *summary, *last], replace(config, summary=None, chunks=None)
