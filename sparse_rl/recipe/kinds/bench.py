"""kind: bench, the time and memory of sampling over cache policies, and of the compaction of contexts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from sparse_rl.config import Configuration, Positive, PositiveInt
from sparse_rl.errors import UserError
from sparse_rl.methods.config import FullConfig, PolicyConfig
from sparse_rl.recipe.kinds.evaluation import PromptCacheSweep
from sparse_rl.recipe.kinds.swept import SweptRecipe


@dataclass(frozen=True, kw_only=True)
class TimedContextsConfig(Configuration):
    """Compactions of a context, timed by stage with the hf engine.

    length : numbers of tokens in the context
    compactions : settings of the compactions; each ratio of a list is timed
    """

    length: list[PositiveInt]
    compactions: list[PromptCacheSweep]

    def points(self) -> list[PromptCacheConfig]:
        points = [point for sweep in self.compactions for point in sweep.points()]
        return [point for place, point in enumerate(points) if point not in points[:place]]


@dataclass(frozen=True, kw_only=True)
class BenchRecipe(SweptRecipe):
    """Time and memory of sampling over cache policies × batch sizes × lengths, and of compactions of contexts.

    The prompts are random tokens, and sampling does not stop at an end-of-sequence token. A full cache is always timed
    too. `rollout.max_batch` is always the greatest number in `batch`.

    random_weights : time a model with random weights; then only the model's configuration is needed
    shape : keys of the model's configuration that are replaced, such as num_hidden_layers; only with random_weights
    batch : numbers of sequences that are sampled at the same time
    prompt_tokens : number of tokens in each prompt
    length : numbers of tokens of a sequence, prompt and completion. Sampling goes on to the greatest one, and time and
        memory are measured at each. If empty, sampling is not timed
    parts : also time the parts of a decode step in every layer (hf engine only). On a GPU this makes sampling slower
    plain_vllm : also time vLLM without this project's plugin, if the engine is vllm
    contexts : compactions of contexts to time; null means none
    repetitions : number of runs of each point; medians are reported
    minutes : limit for the estimated duration of all runs; the batch sizes and contexts that take longest are left out.
        null means no limit
    """

    kind: ClassVar[str] = "bench"
    wanting: ClassVar[str] = "cannot be timed; it needs kind: bench"
    completion_key: ClassVar[str] = "length"
    random_weights: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    batch: list[PositiveInt] = field(default_factory=lambda: [1, 8])
    prompt_tokens: PositiveInt = 128
    length: list[PositiveInt] = field(default_factory=lambda: [1024])
    parts: bool = False
    plain_vllm: bool = False
    contexts: TimedContextsConfig | None = None
    repetitions: PositiveInt = 3
    minutes: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.length and self.contexts is None:
            raise UserError("name at least one length, or set contexts", "length")
        for length in self.length:
            if length <= self.prompt_tokens:
                wrong = f"{length} leaves no token to sample after a prompt of {self.prompt_tokens} tokens; raise it"
                raise UserError(wrong, "length")
        if not self.batch:
            raise UserError("name at least one batch size", "batch")
        contexts = [] if self.contexts is None else self.contexts.length
        for key, values in (("batch", self.batch), ("length", self.length), ("contexts.length", contexts)):
            if len({*values}) < len(values):
                raise UserError("a number is named twice; remove one", key)
        if self.shape and not self.random_weights:
            raise UserError("only a model with random weights can have another shape; set random_weights", "shape")
        object.__setattr__(self, "rollout", replace(self.rollout, max_batch=max(self.batch)))
        if self.length:
            self.check_model_len()

    def read_points(self) -> list[PolicyConfig | None]:
        full = FullConfig()
        points = [point for point in super().read_points() if point is not None or not self.random_weights]
        return [full, *(point for point in points if point != full)]

    def with_lengths_below(self, most: int) -> tuple[Self, list[int]]:
        """Return the recipe without lengths above `most`, and the lengths that were left out."""
        kept = [length for length in self.length if length <= most]
        dropped = [length for length in self.length if length > most]
        contexts = self.contexts
        if contexts is not None:
            dropped += [length for length in contexts.length if length > most]
            contexts = replace(contexts, length=[length for length in contexts.length if length <= most])
        if dropped and not kept and not (contexts and contexts.length):
            wrong = f"the model's context length is {most:,} tokens, less than each length; lower one"
            raise UserError(wrong, "length" if self.length else "contexts.length")
        return replace(self, length=kept, contexts=contexts if contexts and contexts.length else None), dropped

    def without_batch(self, size: int) -> Self:
        """Return the recipe without one batch size; if there is no other, without sampling."""
        batch = [number for number in self.batch if number != size]
        return replace(self, batch=batch) if batch else replace(self, length=[])

    def without_context(self, tokens: int) -> Self:
        """Return the recipe without the contexts of `tokens` tokens."""
        assert self.contexts is not None
        length = [number for number in self.contexts.length if number != tokens]
        return replace(self, contexts=replace(self.contexts, length=length) if length else None)

    def sampling(self, samples: int = 1) -> SamplingConfig:
        tokens = max(self.length, default=self.prompt_tokens + 1) - self.prompt_tokens
        return SamplingConfig(tokens, n=samples, seed=self.seed, ignore_eos=True)

    def prompt_bounds(self) -> list[int | None]:
        return [self.prompt_tokens]

    def sequences(self) -> int | None:
        return max(self.batch)
