"""The reference engine, which other engines must match: plain transformers forward passes over caches that shrink.

Each distinct prompt is prefilled once. When a sequence ends, its row is frozen; once half of a batch's rows are frozen,
they are removed. A prompt gives the same tokens and traces if it is sampled alone, in a batch or in another order.
Between two turns of a conversation, its row of the cache is a cache of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.config import SamplingConfig
from rollout.context import Context, PromptCacheConfig
from rollout.context.budgets import planned
from rollout.context.cache import LayerwiseView, cache_after
from rollout.context.compact import Studied, StudiedParts, study
from rollout.context.reader import ContextPrompts, Reader, check_movable
from rollout.engine import Rollout, Turn, least_rows, requests_of_turns, sampling_stage
from rollout.sampling import (
    NotFiniteLogprobError,
    Request,
    Uniforms,
    forced_token,
    given_logprobs,
    requests_to_sample,
    requests_to_simulate,
    sample,
    stop_tokens,
    token_ids,
)
from sparse_rl.attention.families import (
    check_length,
    global_layers,
    policy_shape,
    refuse_states,
    state_layers,
    windows_of,
)
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import map_of_caches
from sparse_rl.attention.windows import WindowCache
from sparse_rl.clock import Clock
from sparse_rl.errors import UserError
from sparse_rl.experts import RouterRecord, has_experts
from sparse_rl.kernels.exact import padded_layers
from sparse_rl.methods.kvpop.scorers import head_digests
from sparse_rl.models.centres import carry_centres
from sparse_rl.models.directory import SCORERS
from sparse_rl.models.load import head_of, load_model, load_plain_model
from sparse_rl.models.weights import Identity, identify
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import Cache, make_cache
from sparse_rl.progress import Stage
from sparse_rl.states.mixers import States
from sparse_rl.trace import EvictionTrace
from sparse_rl.trace.support import SupportRecord

NO_STATES_OF_CONTEXTS = "a compacted context holds no states"


@dataclass
class PrefilledPrompts:
    """Prompts in a cache of `HFEngine`, one row each, after the evictions at the end of prefill.

    hidden : [B, hidden size], the decoder's last hidden state at each prompt's last token
    """

    cache: Cache
    hidden: Tensor

    def fork(self, rows: Sequence[int]) -> PrefilledPrompts:
        """Return a copy of the prompts in these rows, in the order of `rows`. A row may occur several times."""
        index = torch.tensor(list(rows), device=self.hidden.device)
        return PrefilledPrompts(self.cache.fork(rows), self.hidden[index])


@dataclass(frozen=True, eq=False)
class HeldConversation:
    """A conversation between two turns.

    cache : one row, in which the last sampled token is not yet
    sampling : settings of its turns so far
    sampler : engine that holds it, and what identifies the engine's weights (`_sampler`)
    """

    rollout: Rollout
    cache: Cache
    sampling: SamplingConfig
    sampler: tuple[HFEngine, int, str]


@dataclass
class Row:
    request: Request
    unread: list[int] = field(default_factory=list)  # tokens that are fed, one at a time, before any is sampled
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None


class HFEngine:
    """Samples from any model of the supported families, under any policy.

    model : a directory, or a live module; the engine samples from a live module itself, not from a copy
    dtype : dtype of the weights if `model` is a directory
    device : device on which to load the model; ignored for a live module
    max_batch : maximum number of sequences that are sampled at the same time
    progress : True to show a progress bar
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        policy: Policy,
        *,
        dtype: str = "float32",
        device: str | torch.device | None = None,
        max_batch: int = 64,
        progress: bool = False,
    ) -> None:
        if max_batch < 1:
            raise UserError(f"max_batch must be >= 1, got {max_batch}")
        self.shares_weights = not isinstance(model, (str, Path))
        if isinstance(model, (str, Path)):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise UserError(f"unknown dtype {dtype!r}; for example float32 or bfloat16")
            loaded = (load_model if policy.layered_parameters else load_plain_model)(model, dtype)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
            self.model: PreTrainedModel = nn.Module.to(loaded, device).eval()
        else:
            self.model = model
        adopt(self.model)
        carry_centres(self.model, policy)
        self.policy = policy.bound_to(self.model)
        self.max_batch = max_batch
        self.progress = progress
        self.peak_cache_bytes = 0  # maximum number of bytes of keys and values during the last run

    @property
    def identity(self) -> Identity:
        """Identity of the model with its present weights; it is computed at each call, because weights may change."""
        return identify(self.model)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig, context: Context | None = None
    ) -> list[Rollout]:
        requests = requests_to_sample(prompts, sampling, self.model.config.vocab_size, context)
        return [rollout for rollout, _ in self._run(requests, sampling)]

    def converse(
        self, turns: Sequence[Turn], sampling: SamplingConfig, keep: bool = True
    ) -> list[tuple[Rollout, HeldConversation | None]]:
        own, held = self._sampler(), [turn.held for turn in turns if turn.held is not None]
        if any(getattr(conversation, "sampler", None) != own for conversation in held):
            wrong = "a conversation goes on only in the engine that holds it, and only under the same weights"
            raise UserError(f"{wrong}; begin it again")
        return self._run(requests_of_turns(turns, sampling, self.model.config.vocab_size), sampling, keep)

    def _sampler(self) -> tuple[HFEngine, int, str]:
        """Return this engine, the count of changes of its weights, and some of them: fused optimizers do not count."""
        weights = list(self.model.parameters())
        some = [weight.detach().flatten()[:1].tolist() for weight in weights]
        return self, sum(weight._version for weight in weights), str(some)

    def simulate(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        temperature: float = 1.0,
        context: Context | None = None,
    ) -> list[Rollout]:
        given = requests_to_simulate(prompts, completions, temperature, self.model.config.vocab_size, context)
        return [rollout for rollout, _ in self._run(*given)]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], context: Context
    ) -> list[Tensor]:
        """Implement `Engine.logprobs`: a forward pass reads about as many tokens as a piece of a context has, and
        computes logits for as many tokens at a time as in sampling.
        """
        requests, _ = requests_to_simulate(prompts, completions, 1.0, self.model.config.vocab_size, context)
        self.check_context(context)
        result, least = [], least_rows(next(self.model.parameters()).device)
        for start in range(0, len(requests), self.max_batch):
            batch, cache = requests[start : start + self.max_batch], self._cache(context)
            texts = [[*request.prompt, *(request.forced or [])][:-1] for request in batch]
            piece = max(least, (cache.piece or 1) // len(batch))
            with self._sampling():
                pieces = self._read_pieces(texts, cache, piece)
                result += given_logprobs(batch, pieces, self._logits, max(least, self.max_batch))
        return result

    def compact(
        self,
        tokens: Sequence[int],
        config: PromptCacheConfig,
        prompts: ContextPrompts | None = None,
    ) -> Context:
        """Prefill a context and return it compacted. `generate` and `simulate` can continue it any number of times.

        tokens : token ids of the context
        prompts : prompts about the context, for reference queries of the kinds repeat, self_study and question, and for
            summaries. Without them, a repetition directly follows the context, and the others are refused

        Raises UserError if the context is too short, or if `config.budgets` was made for another model.
        """
        own = self.model.config  # a wrong file of budgets is refused before a long prefill
        planned(config, len(tokens), global_layers(own), own.num_key_value_heads, self.identity)
        return self.study(tokens, config, prompts).compacted(config)

    def study(
        self, tokens: Sequence[int], config: PromptCacheConfig, prompts: ContextPrompts | None = None
    ) -> Studied | StudiedParts:
        """Prefill a context and compute its reference queries, from which compactions of any size can be made, in
        several parts if `config` says so. Arguments are those of `compact`.
        """
        refuse_states(self.model.config, NO_STATES_OF_CONTEXTS)
        (tokens,) = token_ids([tokens], self.model.config.vocab_size)
        prompts = prompts or ContextPrompts()
        token_ids([*prompts.requests, *filter(None, (prompts.repeat, prompts.questions))], self.model.config.vocab_size)
        if config.by_text:
            check_movable(self.model.config)
        with self._sampling():
            return study(tokens, config, Reader(self, prompts))

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Use evaluation mode without gradients in the block, and restore a live module's training mode after it."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)

    def prefill(self, prompts: Sequence[Sequence[int]], context: Context | None = None) -> PrefilledPrompts:
        """Prefill the prompts, even if there are more than max_batch, as one batch."""
        prompts = token_ids(prompts, self.model.config.vocab_size)
        return self._read(prompts, self._cache(context))

    def _cache(self, context: Context | None) -> Cache:
        windows = windows_of(self.model.config)
        if context is not None:  # whose own experts are not recorded
            return cache_after(context.unrecorded() if has_experts(self.model) else context, windows)
        routers = RouterRecord(self.model.config.num_hidden_layers) if has_experts(self.model) else None
        states = States() if state_layers(self.model.config) else None
        return map_of_caches(make_cache(self.policy), WindowCache(windows), routers, states)

    def _read(self, prompts: list[list[int]], cache: Cache) -> PrefilledPrompts:
        """Run the prompts through the model, in pieces of `cache.piece` tokens if the cache sets a piece length."""
        last = torch.tensor([len(p) for p in prompts], device=next(self.model.parameters()).device) - 1
        last_hidden = torch.empty(0)
        for start, hidden in self._read_pieces(prompts, cache, cache.piece):
            offsets = (last - start).clamp(0, hidden.shape[1] - 1)
            hidden_at_end = hidden[torch.arange(len(prompts), device=hidden.device), offsets]
            last_hidden = torch.where((last >= start)[:, None], hidden_at_end, last_hidden) if start else hidden_at_end
        return PrefilledPrompts(cache, last_hidden)

    def _read_pieces(self, prompts: list[list[int]], cache: Cache, piece: int | None) -> Iterator[tuple[int, Tensor]]:
        """Run the prompts through the model, in pieces of `piece` tokens, or all at once. Yields, for each piece,
        (place of its first token, the decoder's last hidden states [B, T, hidden size]).
        """
        device = next(self.model.parameters()).device
        lengths = [len(p) for p in prompts]
        check_length(self.model.config, max(lengths) + cache.past)
        least = least_rows(device)
        whole = max(least, *lengths)
        piece = piece or whole
        width = max(whole, (whole - 1) // piece * piece + least)  # so that the last piece also has `least` tokens
        # The padding is the prompt's last token: another token, such as token 0, may have a NaN embedding.
        ids = torch.tensor([[*prompt, *prompt[-1:] * (width - len(prompt))] for prompt in prompts])
        for start in range(0, width, piece):
            piece_ids = ids[:, start : start + piece].to(device)
            cache.begin_prefill([min(max(n - start, 0), piece) for n in lengths], device)
            places = torch.arange(start, start + piece_ids.shape[1], device=device)[None] + cache.past
            with self._sampling():
                hidden = self._hidden(piece_ids, places, cache)
            yield start, hidden

    def check_context(self, context: Context) -> None:
        """Raise UserError if the context was made by another model."""
        config = self.model.config
        refuse_states(config, NO_STATES_OF_CONTEXTS)
        context.check_model(policy_shape(config), windows_of(config), self.identity)

    def _run(
        self, requests: list[Request], sampling: SamplingConfig, keep: bool = False
    ) -> list[tuple[Rollout, HeldConversation | None]]:
        if requests and requests[0].context is not None:
            self.check_context(requests[0].context)
        check_length(self.model.config, max((len(r.tokens) + r.max_tokens for r in requests), default=0))
        results: dict[int, tuple[Rollout, HeldConversation | None]] = {}
        self.peak_cache_bytes, sampler = 0, self._sampler() if keep else None
        begins, goes_on = ([r for r in requests if (r.held is None) is new] for new in (True, False))
        starts = [(part, start) for part in (begins, goes_on) for start in range(0, len(part), self.max_batch)]
        with self._sampling(), sampling_stage(requests, self.progress) as shown:
            for part, start in starts:
                for request, rollout, cache in self._wave(part[start : start + self.max_batch], sampling, shown, keep):
                    held = HeldConversation(rollout, cache, sampling, sampler) if cache and sampler else None
                    results[request.place] = rollout, held
                    shown.advance()
        return [results[place] for place in range(len(requests))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own_weights = self.model.state_dict()  # with both names of tied weights, and with buffers
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own_weights:
                    raise UserError(f"the engine's model has no weight {name!r}")
                if (shape := own_weights[name].shape) != tensor.shape:
                    raise UserError(f"weight {name!r} has shape {list(shape)}, got {list(tensor.shape)}")
                own_weights[name].copy_(tensor)

    def scorer_digests(self) -> dict[str, list[str]]:
        scorers = getattr(self.model, SCORERS, None)
        return {} if scorers is None else head_digests(dict(scorers.named_parameters()))

    def close(self) -> None:
        del self.model

    # ---- one wave: at most max_batch sequences, from prefill to the last token --------------------------------------

    def _wave(
        self, requests: list[Request], sampling: SamplingConfig, shown: Stage, keep: bool
    ) -> Iterable[tuple[Request, Rollout, Cache | None]]:
        device = next(self.model.parameters()).device
        stop = stop_tokens(sampling, self.model.generation_config, self.model.config)
        least = least_rows(device)
        rows = [Row(request) for request in requests]
        for _ in range(least - len(requests)):
            rows.append(Row(replace(requests[0], place=-1, forced=None), tokens=[0], finish_reason="length"))
        cache, logits = (self._prefill_and_fork if requests[0].held is None else self._go_on)(rows)
        streams, supports = [Uniforms(row.request.seed) for row in rows], SupportRecord()
        for step in count():
            self.peak_cache_bytes = max(self.peak_cache_bytes, cache.allocated_bytes())
            if step % 32 == 0:
                shown.tell(f"{step} tokens")
            uniform = None
            if sampling.temperature > 0 and requests[0].forced is None:
                numbers = [s.at(len(row.tokens)) for s, row in zip(streams, rows, strict=True)]
                uniform = torch.tensor(numbers, dtype=torch.float64, device=device)
            tokens = [forced_token(len(row.tokens), row.request.forced, sampling) for row in rows]
            forced = torch.tensor(tokens, device=device) if max(tokens) >= 0 else None
            drawn = sample(logits, sampling, uniform, forced)
            for bits in drawn[3:]:
                supports.draw([(row.request.place, len(row.tokens)) for row in rows], bits)
            tokens, logprobs, model_logprobs = (t.tolist() for t in drawn[:3])
            if Clock.running is not None:
                sampled = sum(row.finish_reason is None for row in rows)
                Clock.running.step(sampled, cache.allocated_bytes(), sampled)
            for i, row in enumerate(rows):
                if row.finish_reason is not None or row.unread:
                    continue
                if not math.isfinite(model_logprobs[i]):
                    dtype = str(logits.dtype).removeprefix("torch.")
                    raise NotFiniteLogprobError(*divmod(row.request.place, sampling.n), len(row.tokens), dtype)
                row.tokens.append(tokens[i])
                row.logprobs.append(logprobs[i])
                row.model_logprobs.append(model_logprobs[i])
                if tokens[i] in stop:
                    row.finish_reason = "stop"
                elif len(row.tokens) == row.request.max_tokens:
                    row.finish_reason = "length"
                else:
                    continue
                rollout = self._rollout(row, cache.trace(i, len(row.request.tokens) + len(row.tokens)), supports)
                yield row.request, rollout, cache.taken(i) if keep else None

            active = [row.finish_reason is None for row in rows]
            if not any(active):
                return
            if sum(active) <= len(rows) // 2 and len(rows) > least:
                stay = sorted(range(len(rows)), key=lambda i: not active[i])[: max(sum(active), least)]
                cache.select(stay)
                streams = [streams[i] for i in stay]
                rows, active = [rows[i] for i in stay], [active[i] for i in stay]
            logits = self._feed([row.unread.pop(0) if row.unread else row.tokens[-1] for row in rows], active, cache)

    def _prefill_and_fork(self, rows: Sequence[Row]) -> tuple[Cache, Tensor]:
        """Prefill each distinct prompt once. Returns the cache, one row per prompt, and the next logits [B, V]."""
        prompts = [row.request.prompt for row in rows]
        distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        prefilled = self.prefill(list(distinct), rows[0].request.context)
        places = [distinct[tuple(prompt)] for prompt in prompts]
        if places != list(range(len(distinct))):
            prefilled = prefilled.fork(places)
        return prefilled.cache, self._logits(prefilled.hidden)

    def _go_on(self, rows: Sequence[Row]) -> tuple[Cache, Tensor]:
        """Join the caches of conversations, and read what came since their last sampled tokens, these included: as a
        chunk, or the first token of it if it is read one by one. Returns the cache, and the next logits [B, V].
        """
        cache = type(rows[0].request.held.cache).joined([row.request.held.cache for row in rows])
        chunks = [row.request.prompt[seen:] for row, seen in zip(rows, cache.seen, strict=True)]
        if not self.policy.reads_chunks or state_layers(self.model.config):  # a state steps from token to token
            for row, chunk in zip(rows, chunks, strict=True):
                row.unread = chunk[1:] if row.finish_reason is None else []
            return cache, self._feed([chunk[0] for chunk in chunks], [row.finish_reason is None for row in rows], cache)
        counts, device = [len(chunk) for chunk in chunks], next(self.model.parameters()).device
        width = max(least_rows(device), *counts)
        ids = torch.tensor([[*chunk, *chunk[-1:] * (width - len(chunk))] for chunk in chunks], device=device)
        places = torch.tensor(cache.seen, device=device)[:, None] + torch.arange(width, device=device)
        cache.begin_chunk(counts, device)
        hidden = self._hidden(ids, places, cache)
        last = torch.tensor(counts, device=device) - 1
        return cache, self._logits(hidden[torch.arange(len(rows), device=device), last])

    def _feed(self, tokens: Sequence[int], active: Sequence[bool], cache: Cache) -> Tensor:
        """Feed one token to each row. Returns the next logits [B, V]."""
        device = next(self.model.parameters()).device
        cache.begin_decode(active, device)
        positions = torch.tensor([[n - 1] for n in cache.seen], device=device)
        ids = torch.tensor([[token] for token in tokens], device=device)
        return self._logits(self._hidden(ids, positions, cache)[:, 0])

    def _rollout(self, row: Row, trace: EvictionTrace, supports: SupportRecord) -> Rollout:
        """Return the rollout of a finished row; of a conversation that goes on, with its earlier turns."""
        request = row.request
        assert row.finish_reason is not None
        earlier: Rollout | None = None if request.held is None else request.held.rollout
        before = {} if earlier is None else earlier.trace.further
        trace = trace.beside(supports.take(request.place, len(trace), before))
        numbers = row.tokens, row.logprobs, row.model_logprobs, trace, row.finish_reason
        if earlier is None:
            return Rollout(request.tokens, *numbers)
        return earlier.then(request.prompt[len(earlier.trace) :], *numbers)

    def _hidden(self, ids: Tensor, positions: Tensor, cache: Cache | LayerwiseView) -> Tensor:
        """Return the decoder's last hidden states [B, T, hidden size] for token ids [B, T]."""
        decoder = self.model.get_decoder()
        with padded_layers(ids.numel(), ids.device):
            out = decoder(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=cache, use_cache=False)
        return out.last_hidden_state

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, V] for hidden states [B, hidden size]."""
        with padded_layers(len(hidden), hidden.device):
            return head_of(self.model)(hidden)
