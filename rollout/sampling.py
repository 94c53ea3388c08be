"""Steps common to all engines: requests with their seeds and stop tokens, and the sampler.

Each sequence draws one uniform number per step from its own generator and inverts the CDF in vocabulary order, in
float64. So a sequence's tokens depend only on its logits, its seed and its own length.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.config import SamplingConfig
from sparse_rl.errors import NotFiniteError, UserError
from sparse_rl.trace.support import packed

if TYPE_CHECKING:
    from rollout.context import Context


@dataclass(frozen=True)
class Request:
    """One requested sequence.

    place : index in the list of rollouts that the engine returns
    prompt : token ids of the prompt, without those of the compacted context that it may follow; of a conversation, all
        tokens before those that are sampled now
    forced : the given completion if the sequence is simulated
    held : what the engine holds of the conversation (`Turn.held`), if it goes on
    """

    place: int
    prompt: list[int]
    max_tokens: int
    seed: int = 0
    forced: list[int] | None = None
    context: Context | None = None
    held: Any = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the context, followed by those of the prompt."""
        return self.prompt if self.context is None else [*self.context.tokens, *self.prompt]


def requests_to_sample(
    prompts: Sequence[Sequence[int]], sampling: SamplingConfig, vocabulary: int, context: Context | None = None
) -> list[Request]:
    """Return the requests of a call of `Engine.generate`: `sampling.n` per prompt, prompt by prompt, with different
    seeds for all samples of equal prompts.
    """
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    times: Counter[tuple[int, ...]] = Counter()
    requests: list[Request] = []
    for prompt in token_ids(prompts, vocabulary):
        for _ in range(sampling.n):
            request_seed = sequence_seed(seed, prompt, times[tuple(prompt)])
            requests.append(Request(len(requests), list(prompt), sampling.max_tokens, request_seed, context=context))
            times[tuple(prompt)] += 1
    return requests


def requests_to_simulate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    vocabulary: int,
    context: Context | None = None,
) -> tuple[list[Request], SamplingConfig]:
    """Return the requests of a call of `Engine.simulate`, and settings for decoding their given completions to the end
    of the longest.
    """
    if len(prompts) != len(completions):
        raise UserError(f"{len(prompts)} prompts but {len(completions)} completions; give one for each prompt")
    forced = token_ids(completions, vocabulary, "completion")
    requests = [
        Request(i, prompt, len(completion), forced=completion, context=context)
        for i, (prompt, completion) in enumerate(zip(token_ids(prompts, vocabulary), forced, strict=True))
    ]
    longest = max(map(len, forced), default=1)
    return requests, SamplingConfig(longest, temperature=temperature, ignore_eos=True)


def token_ids(texts: Sequence[Sequence[int]], vocabulary: int, what: str = "prompt") -> list[list[int]]:
    """Convert texts to plain lists of token ids. Raises UserError for an empty text or an id outside the vocabulary."""
    id_lists = []
    for i, text in enumerate(texts):
        try:
            ids = [index(token) for token in text]
        except TypeError as error:
            raise UserError(f"{what} {i} is not a list of token ids, which are whole numbers: {error}") from error
        if not ids:
            raise UserError(f"{what} {i} is empty; it needs at least one token")
        if wrong := [token for token in ids if not 0 <= token < vocabulary][:1]:
            raise UserError(f"{what} {i} has token {wrong[0]}; the model's token ids are 0 to {vocabulary - 1}")
        id_lists.append(ids)
    return id_lists


def forced_token(step: int, completion: Sequence[int] | None, sampling: SamplingConfig) -> int:
    """Return the token that a sequence must take at a step, by its given completion if it is simulated; -1 means that
    the token is sampled.
    """
    if completion is not None:
        return completion[step] if step < len(completion) else 0  # after its end, the sequence only fills the batch
    place = step - sampling.forced_from
    return sampling.forced[place] if 0 <= place < len(sampling.forced) else -1


class NotFiniteLogprobError(NotFiniteError):
    """Raised if the log-prob of a completion's token is NaN or infinite.

    prompt, sample, step : indices of the prompt, of the prompt's sample, and of the token in the completion
    dtype : name of the dtype that the model computes in
    """

    def __init__(self, prompt: int, sample: int, step: int, dtype: str) -> None:
        overflow = ". float16 overflows at values that bfloat16 and float32 can hold" if dtype == "float16" else ""
        super().__init__(
            f"prompt {prompt}, sample {sample}: the log-probability of token {step} of the completion is not finite, "
            f"because the model's weights, or its activations in {dtype}, are NaN or infinite; use an undamaged "
            f"checkpoint, or set another dtype{overflow}"
        )
        self.prompt, self.sample, self.step, self.dtype = prompt, sample, step, dtype

    def of_prompt(self, prompt: int) -> NotFiniteLogprobError:
        """Return a copy of this error in which `prompt` is the index in the caller's own list of prompts."""
        return NotFiniteLogprobError(prompt, self.sample, self.step, self.dtype)


def sequence_seed(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return the seed of one sequence, which does not depend on the sequence's place in a batch."""
    digest = hashlib.blake2b(f"{seed}|{sample}|{','.join(map(str, prompt))}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def stop_tokens(sampling: SamplingConfig, generation_config: Any, config: Any) -> list[int]:
    """Return the ids of the tokens that end a completion: `sampling.stop_token_ids` if given, none with
    `sampling.ignore_eos`, else the end-of-sequence tokens of the model's generation config, if any, or of its
    configuration.
    """
    if sampling.stop_token_ids is not None:
        return list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        return []
    eos = getattr(generation_config, "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    return list(eos) if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]


# ---- the sampler ----------------------------------------------------------------------------------------------------

BLOCK = 512  # uniforms drawn at a time
AT_ONCE = 2**18  # logits that a CPU processes at a time: 2 MiB in float64, so that they stay in a core's cache
LANES = 64  # upper bound on the numbers that a CPU adds in parallel


class Uniforms:
    """One sequence's stream of uniform numbers in float64."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator()
        self.seed, self.number, self.block = seed, math.inf, [0.0]

    def at(self, step: int) -> float:
        """Return the uniform number of a step. Any order of steps is allowed; an increasing order is the fastest."""
        number, place = divmod(step, BLOCK)
        if number < self.number:
            self.generator.manual_seed(self.seed)
            self.number = -1
        while self.number < number:
            self.block = torch.rand(BLOCK, generator=self.generator, dtype=torch.float64).tolist()
            self.number += 1
        return self.block[place]


def sample(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, forced: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Sample one token for each of B rows.

    logits : [B, V]
    uniform : float64 [B], one uniform number per row; None means that each row takes its most likely token
    forced : int64 [B]; a value other than -1 replaces the sampled token, whose log-prob is then that before truncation

    Returns the tokens int64 [B], their log-probs float32 [B] under the sampling distribution, and their log-probs
    float32 [B] before min-p, top-k and top-p; if `sampling.records_support` and tokens are drawn, also the supports of
    the draws as bits (`packed`), int32 [B, W], 0 for forced tokens. Never waits for the device.
    """
    rows = max(1, AT_ONCE // logits.shape[-1]) if logits.is_cpu else len(logits)
    if len(logits) > rows:
        parts = []
        for i in range(0, len(logits), rows):
            u, f = (None if column is None else column[i : i + rows] for column in (uniform, forced))
            parts.append(sample(logits[i : i + rows], sampling, u, f))
        return tuple(map(torch.cat, zip(*parts, strict=True)))
    scaled = sampling.temperature not in (0, 1)
    logprobs = (logits.float() / sampling.temperature if scaled else logits.float()).log_softmax(-1)
    cut = uniform is not None and sampling.truncated_support
    processed = truncate(logprobs, sampling.top_p, sampling.top_k, sampling.min_p) if cut else logprobs
    return drawn(logprobs, processed, uniform, forced, cut and sampling.record_support)


def drawn(
    logprobs: Tensor, processed: Tensor, uniform: Tensor | None, forced: Tensor | None, record: bool = False
) -> tuple[Tensor, ...]:
    """Sample tokens as `sample` does. logprobs, processed : float32 [B, V], before and after the truncation"""
    if uniform is None:
        tokens = logprobs.argmax(-1)
    else:
        cdf = processed.double().exp_().cumsum_(-1)
        target = (uniform * cdf[:, -1])[:, None]
        tokens = torch.searchsorted(cdf, target, right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)
    if forced is not None:
        tokens = torch.where(forced < 0, tokens, forced)
        processed = torch.where(forced[:, None] < 0, processed, logprobs)
    results = tokens, *(values.gather(-1, tokens[:, None])[:, 0] for values in (processed, logprobs))
    if not record:
        return results
    bits = packed(processed > float("-inf"))
    return *results, bits if forced is None else bits.masked_fill(forced[:, None] >= 0, 0)


def truncate(logprobs: Tensor, top_p: float, top_k: int | None, min_p: float = 0.0) -> Tensor:
    """Restrict log-probs [B, V] by min-p, top-k and top-p, in this order, and renormalise them; other tokens get -inf.

    Top-p keeps the smallest set of tokens with total probability >= top_p. With top-k, only the max(top_k, LANES) most
    likely tokens are ranked. All other tokens would only add zeros to the sums; since at least LANES tokens are ranked,
    every sum on a CPU has the same bits as a sum over the whole vocabulary.
    """
    size, logprobs = logprobs.shape[-1], _at_least(logprobs, min_p)
    if top_k is None and top_p == 1:
        return logprobs.log_softmax(-1)
    order = ranking(logprobs, size if top_k is None else min(size, max(top_k, LANES)))
    outside = torch.zeros_like(order, dtype=torch.bool)
    if top_k is not None:
        outside[:, top_k:] = True
    if top_p < 1:
        mass = logprobs.gather(-1, order).masked_fill_(outside, float("-inf")).log_softmax(-1).exp_()
        outside |= mass.cumsum(-1).sub_(mass) >= top_p
    outside = torch.ones_like(logprobs, dtype=torch.bool).scatter_(-1, order, outside)
    return logprobs.masked_fill(outside, float("-inf")).log_softmax(-1)


def _at_least(logprobs: Tensor, min_p: float) -> Tensor:
    """Give -inf to all tokens whose probability is below min_p times that of the most likely token."""
    if min_p == 0:
        return logprobs
    return logprobs.masked_fill(logprobs < logprobs.amax(-1, keepdim=True) + math.log(min_p), float("-inf"))


def ranking(logprobs: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` most likely tokens of each row of log-probs [B, V], best first, and equal ones
    by index: int64 [B, count].

    The bits of a non-positive float, read as an integer, grow as the number falls. A sort key is these bits, then the
    token index, so no two keys are equal. On a CPU, NumPy's selection is far faster than PyTorch's sort or top-k.
    """
    size = logprobs.shape[-1]
    if count == size and not logprobs.is_cpu:  # a GPU sorts byte by byte, and the keys have twice as many bytes
        return logprobs.sort(dim=-1, descending=True, stable=True).indices
    keys = logprobs.view(torch.int32).long().bitwise_and_(0x7FFFFFFF)
    keys.bitwise_left_shift_(32).add_(torch.arange(size, device=logprobs.device))
    if not logprobs.is_cpu:
        return keys.topk(count, largest=False).values & 0xFFFFFFFF
    keys.numpy().partition(count - 1)
    best = keys[:, :count]
    best.numpy().sort()
    return best & 0xFFFFFFFF


# ---- the plain sampler, which sorts the whole vocabulary: the same results, on a CPU the same bits ------------------


def sample_reference(
    logits: Tensor, sampling: SamplingConfig, uniform: Tensor | None, forced: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Sample one token per row; arguments and results are those of `sample`."""
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    cut = uniform is not None and sampling.truncated_support
    processed = truncate_reference(logprobs, sampling.top_p, sampling.top_k, sampling.min_p) if cut else logprobs
    return drawn(logprobs, processed, uniform, forced, cut and sampling.record_support)


def truncate_reference(logprobs: Tensor, top_p: float, top_k: int | None, min_p: float = 0.0) -> Tensor:
    """Return the same values as `truncate`."""
    logprobs = _at_least(logprobs, min_p)
    ranked, order = logprobs.sort(dim=-1, descending=True, stable=True)
    outside = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k is not None:
        outside[:, top_k:] = True
    if top_p < 1:
        ranked = ranked.masked_fill(outside, float("-inf")).log_softmax(-1)
        before = ranked.exp().cumsum(-1) - ranked.exp()
        outside |= before >= top_p
        outside[:, 0] = False
    outside = torch.zeros_like(outside).scatter(-1, order, outside)
    return logprobs.masked_fill(outside, float("-inf")).log_softmax(-1)


# ---- given completions, read in whole pieces (teacher forcing) ------------------------------------------------------


def given_logprobs(
    requests: Sequence[Request], pieces: Iterable[tuple[int, Tensor]], logits_of: Callable[[Tensor], Tensor], rows: int
) -> list[Tensor]:
    """Return the log-probs of each request's given completion at temperature 1: float32 [T] on the CPU for T tokens.

    pieces : for each piece of the texts, (place of its first token, hidden states [B, tokens of the piece, hidden
        size]); a text is a prompt and its completion, without the last token
    logits_of : function hidden states [M, hidden size] -> logits [M, V]
    rows : maximum number of tokens whose logits are in memory at the same time

    Raises NotFiniteLogprobError at the first log-prob that is not finite, which a NaN after it in its piece may cause.
    """
    given = [request.forced or [] for request in requests]
    starts = [len(request.prompt) - 1 for request in requests]  # the state of the prompt's last token predicts first
    width = max(start + len(tokens) for start, tokens in zip(starts, given, strict=True))
    targets = torch.full((len(requests), width), -1)
    for row, (start, tokens) in enumerate(zip(starts, given, strict=True)):
        targets[row, start : start + len(tokens)] = torch.tensor(tokens)
    logprobs, dtype = torch.zeros(targets.shape), ""
    for place, hidden in pieces:
        wanted = targets[:, place : place + hidden.shape[1]]
        scored = wanted >= 0
        states = hidden[:, : wanted.shape[1]][scored.to(hidden.device)]
        dtype = str(hidden.dtype).removeprefix("torch.")
        values = [
            logits_of(some_states).float().log_softmax(-1).gather(-1, tokens.to(hidden.device)[:, None])[:, 0]
            for some_states, tokens in zip(states.split(rows), wanted[scored].split(rows), strict=True)
            if len(tokens)
        ]
        if values:
            logprobs[:, place : place + hidden.shape[1]][scored] = torch.cat(values).cpu()
    result = [logprobs[row, start : start + len(given[row])] for row, start in enumerate(starts)]
    for request, row_logprobs in zip(requests, result, strict=True):
        if len(wrong := (~row_logprobs.isfinite()).nonzero()):
            raise NotFiniteLogprobError(request.place, 0, int(wrong[0]), dtype)
    return result
