"""Steps common to all engines before they sample: the requested sequences, their seeds and their stop tokens."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

from rollout.config import SamplingConfig
from sparse_rl.errors import NotFiniteError, UserError

if TYPE_CHECKING:
    from rollout.context import Context


@dataclass(frozen=True)
class Request:
    """One requested sequence.

    place : index in the list of rollouts that the engine returns
    prompt : token ids of the prompt, without the context
    forced : the given completion if the sequence is simulated; None if it is sampled
    context : compacted context that the prompt follows; None if there is none
    """

    place: int
    prompt: list[int]
    max_tokens: int
    seed: int = 0
    forced: list[int] | None = None
    context: Context | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the context, followed by those of the prompt."""
        return self.prompt if self.context is None else [*self.context.tokens, *self.prompt]


def requests_to_sample(
    prompts: Sequence[Sequence[int]], sampling: SamplingConfig, vocabulary: int, context: Context | None = None
) -> list[Request]:
    """Return the requests of a call of `Engine.generate`: `sampling.n` per prompt, prompt by prompt.

    All samples of equal prompts have different seeds.
    """
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    times: Counter[tuple[int, ...]] = Counter()
    requests: list[Request] = []
    for prompt in token_ids(prompts, vocabulary):
        key = tuple(prompt)
        for _ in range(sampling.n):
            request_seed = sequence_seed(seed, key, times[key])
            requests.append(Request(len(requests), list(prompt), sampling.max_tokens, request_seed, context=context))
            times[key] += 1
    return requests


def requests_to_simulate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    vocabulary: int,
    context: Context | None = None,
) -> tuple[list[Request], SamplingConfig]:
    """Return the requests of a call of `Engine.simulate`, and settings for decoding their given completions.

    In these settings max_tokens is the length of the longest completion, and no token ends a completion earlier.
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
    """Return the token that a sequence must take at a step; -1 means that the token is sampled.

    completion : the given completion if the sequence is simulated. After the completion's end, 0 is returned: the
        sequence then only fills the batch, and its tokens are ignored
    """
    if completion is not None:
        return completion[step] if step < len(completion) else 0
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
            f"because the model's weights, or its activations in {dtype}, are NaN or infinite; use an earlier "
            f"checkpoint or an undamaged copy of the weights, or set another dtype{overflow}"
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
    """Return the ids of the tokens that end a completion.

    If `sampling.stop_token_ids` is given, it is returned. Otherwise, if `sampling.ignore_eos` is true, no token ends a
    completion. Otherwise the model's end-of-sequence tokens do.

    generation_config : the model's generation config; None if the model has none
    config : the model's configuration, used if `generation_config` names no end-of-sequence token
    """
    if sampling.stop_token_ids is not None:
        return list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        return []
    eos = getattr(generation_config, "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    return list(eos) if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
