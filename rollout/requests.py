"""What every engine does alike before it samples: which sequences are asked for, with which seeds and stop tokens.

It knows neither models nor caches.
"""

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
    """One sequence that is asked for.

    place : in the list of rollouts that the engine returns
    seed : of its uniform numbers
    forced : the completion, where it is not sampled but simulated
    context : that the prompt stands behind
    """

    place: int
    prompt: list[int]
    max_tokens: int
    seed: int = 0
    forced: list[int] | None = None
    context: Context | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens of the context and the prompt."""
        return self.prompt if self.context is None else [*self.context.tokens, *self.prompt]


def requests_to_sample(
    prompts: Sequence[Sequence[int]], sampling: SamplingConfig, vocabulary: int, context: Context | None = None
) -> list[Request]:
    """The requests of `Engine.generate`, prompt-major. A prompt that comes twice is sampled anew.

    vocabulary : its size
    """
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    times: Counter[tuple[int, ...]] = Counter()
    requests: list[Request] = []
    for prompt in token_ids(prompts, vocabulary):
        key = tuple(prompt)
        for _ in range(sampling.n):
            own = sequence_seed(seed, key, times[key])
            requests.append(Request(len(requests), list(prompt), sampling.max_tokens, own, context=context))
            times[key] += 1
    return requests


def requests_to_simulate(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float,
    vocabulary: int,
    context: Context | None = None,
) -> tuple[list[Request], SamplingConfig]:
    """The requests of `Engine.simulate`, and how they are "sampled": to the last token of the longest."""
    if len(prompts) != len(completions):
        raise UserError(f"{len(prompts)} prompts and {len(completions)} completions; there must be one for each")
    forced = token_ids(completions, vocabulary, "completion")
    requests = [
        Request(i, prompt, len(completion), forced=completion, context=context)
        for i, (prompt, completion) in enumerate(zip(token_ids(prompts, vocabulary), forced, strict=True))
    ]
    longest = max(map(len, forced), default=1)
    return requests, SamplingConfig(longest, temperature=temperature, ignore_eos=True)


def token_ids(texts: Sequence[Sequence[int]], vocabulary: int, what: str = "prompt") -> list[list[int]]:
    """The texts as plain lists of token ids. Raises UserError for what is empty, or not of the vocabulary."""
    found = []
    for i, text in enumerate(texts):
        try:
            ids = [index(token) for token in text]
        except TypeError as error:
            raise UserError(f"{what} {i} is not a list of token ids, which are whole numbers: {error}") from error
        if not ids:
            raise UserError(f"{what} {i} is empty; it needs at least one token")
        if wrong := [token for token in ids if not 0 <= token < vocabulary][:1]:
            raise UserError(f"{what} {i} has token {wrong[0]}; the model knows 0 to {vocabulary - 1}")
        found.append(ids)
    return found


def forced_token(step: int, completion: Sequence[int] | None, sampling: SamplingConfig) -> int:
    """What a sequence takes at a step, whatever the model says; -1: it is drawn.

    completion : where it is simulated; behind its end a sequence only fills its batch, and takes any token
    """
    if completion is not None:
        return completion[step] if step < len(completion) else 0
    place = step - sampling.forced_from
    return sampling.forced[place] if 0 <= place < len(sampling.forced) else -1


class NotFiniteLogprobError(NotFiniteError):
    """The log-prob of a token is NaN or infinite.

    prompt, sample : of the sequence; step : of its completion; dtype : that the model computes in, by name
    """

    def __init__(self, prompt: int, sample: int, step: int, dtype: str) -> None:
        overflow = ". float16 overflows where bfloat16 and float32 do not" if dtype == "float16" else ""
        super().__init__(
            f"prompt {prompt}, sample {sample}: the log-probability of token {step} of the completion is not finite, "
            f"as the model's weights, or its activations in {dtype}, are NaN or infinite; take an earlier checkpoint "
            f"or a copy of the weights that is whole, or set another dtype{overflow}"
        )
        self.prompt, self.sample, self.step, self.dtype = prompt, sample, step, dtype

    def of_prompt(self, prompt: int) -> NotFiniteLogprobError:
        """The same, where the prompt has another number for whoever asked."""
        return NotFiniteLogprobError(prompt, self.sample, self.step, self.dtype)


def sequence_seed(seed: int, prompt: Sequence[int], sample: int) -> int:
    """The seed of one sequence: of (seed, prompt, sample index), not of its place in a batch."""
    digest = hashlib.blake2b(f"{seed}|{sample}|{','.join(map(str, prompt))}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 1


def stop_tokens(sampling: SamplingConfig, generation_config: Any, config: Any) -> list[int]:
    """The tokens that end a completion: those asked for, or the end-of-sequence tokens that the model names.

    generation_config : of the model, which goes before its `config`; None where it has none
    """
    if sampling.stop_token_ids is not None:
        return list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        return []
    eos = getattr(generation_config, "eos_token_id", None)
    eos = config.eos_token_id if eos is None else eos
    return list(eos) if isinstance(eos, (list, tuple)) else [] if eos is None else [eos]
