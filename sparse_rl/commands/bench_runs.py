"""The runs of `sparse-rl bench`: open engines, sample or compact, and write the times to the journal."""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from rollout.context.prompts import MOST_QUESTIONS, REQUESTS, SUMMARIES, ContextPrompts
from rollout.evaluation.journal import Journal
from rollout.timing.contexts import time_context
from rollout.timing.sampling import time_sampling
from rollout.vllm.beside import BLOCK, pool_bytes
from sparse_rl.commands.bench_points import OUT_OF_MEMORY, PLAIN, Bench, Line, Point
from sparse_rl.commands.sampling import engine_arguments, engines
from sparse_rl.models.random_weights import attach_random_scorers, save_random_model
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage, stage
from sparse_rl.recipe import BenchRecipe
from sparse_rl.temporary import temporary_folder

WARM_UP = 8  # tokens that an engine samples before it is timed
WARM_UP_CONTEXT = 128  # tokens of a context that is compacted before one is timed
STUDY_PROMPT = 16  # tokens of each prompt about a context


def time_benches(recipe: BenchRecipe, benches: Sequence[Bench], journal: Journal) -> Iterator[None]:
    """Run everything that the journal lacks, and yield after each run."""
    for bench in benches:
        bench.journal = journal
    missing = sum(len(point.missing(journal)) for bench in benches for point in bench.points)
    with stage("timing", total=missing, unit="run", shown=recipe.rollout.progress) as shown:
        for number in range(recipe.repetitions):
            for bench in benches:
                yield from _Runner(bench, journal, number, shown).run()
                if bench.prepared.recipe.rollout.engine != "hf" or len(benches) > 1:
                    bench.loaded = None  # makes room for vLLM, or for another model


class _Runner:
    """The runs with one number, of all points of a bench."""

    def __init__(self, bench: Bench, journal: Journal, number: int, shown: Stage) -> None:
        self.bench, self.journal, self.number, self.shown = bench, journal, number, shown
        self.prepared, self.recipe = bench.prepared, bench.prepared.recipe
        self.points = [point for point in bench.points if number in point.missing(journal)]

    def run(self) -> Iterator[None]:
        sampled = [point for point in self.points if isinstance(point.cache, Policy) and point.engine != PLAIN]
        contexts = [point for point in self.points if isinstance(point.cache, PromptCacheConfig)]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=temporary_folder())))
            yield from self._sample(sampled, folder)
            if plain := [point for point in self.points if point.engine == PLAIN]:
                yield from self._sample_plain(plain, folder)
            yield from self._compact(contexts)

    def _done(self, point: Point, line: Line) -> None:
        self.journal.add([{"point": point.key, "unit": [self.number], **line}])
        self.shown.advance()

    def _sample(self, points: Sequence[Point], folder: Path) -> Iterator[None]:
        by_cache: dict[int, list[Point]] = {}
        for point in points:
            by_cache.setdefault(id(point.cache), []).append(point)
        if not by_cache:
            return
        opened = self._engines(folder)
        for alike in by_cache.values():
            policy: Any = alike[0].cache
            with opened(policy) as engine:
                for point in alike:
                    self.shown.tell(str(point))
                    self._done(point, attempted(partial(self._sampled, engine, point.size)))
                    yield

    def _sampled(self, engine: Any, batch: int) -> Line:
        prompts, recipe = self._prompts(batch), self.recipe
        engine.generate(prompts, SamplingConfig(self._warm_up(engine.policy), seed=0, ignore_eos=True))
        on_gpu = torch.cuda.is_available() and recipe.rollout.engine == "vllm"  # where vLLM reserves its memory
        measured = time_sampling(
            partial(engine.generate, prompts, recipe.sampling()),
            batch, recipe.prompt_tokens, recipe.length, detailed=recipe.parts, observed=_observed(engine),
        )  # fmt: skip
        return {
            "lengths": [{**dataclasses.asdict(one), **({"peak_bytes": None} if on_gpu else {})} for one in measured]
        }

    def _warm_up(self, policy: Policy) -> int:
        """Return the number of tokens to sample before timing. In the first run, they include a compaction."""
        prompt, most = self.recipe.prompt_tokens, self.recipe.sampling().max_tokens
        compacts = policy.schedule.evicts and self.number == 0
        tokens = policy.schedule.first(prompt) - prompt + 2 if compacts else 0
        return min(max(WARM_UP, tokens), most)

    def _prompts(self, batch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        size = (batch, self.recipe.prompt_tokens)
        return torch.randint(self.prepared.config.vocab_size, size, generator=generator).tolist()

    def _engines(self, folder: Path) -> Callable[[Policy], Any]:
        """Return a function that opens an engine for a policy, as a context manager."""
        recipe, prepared = self.recipe, self.prepared
        if recipe.rollout.engine == "hf":
            live = self.bench.live()
            of_policy = engines(live)

            def open_hf(policy: Policy) -> Any:
                if recipe.random_weights:
                    attach_random_scorers(live.live, policy)
                return of_policy(policy)

            return open_hf

        def open_vllm(policy: Policy) -> Any:
            _free_memory()
            own = replace(prepared, recipe=replace(recipe, model=self._directory(policy, folder)))
            return engines(own)(policy, **self._pool())

        return open_vllm

    def _pool(self) -> dict[str, Any]:
        """Return the size of vLLM's cache: on a CPU, if the recipe sets none, enough for all sequences."""
        rollout, cuda = self.recipe.rollout, torch.cuda.is_available()
        if cuda or rollout.kv_cache_gb is not None:
            return {}
        arguments = engine_arguments(self.recipe)
        sizes = [pool_bytes(policy, arguments, self.prepared.config, cuda) for policy in self.prepared.policies]
        return {"kv_cache_gb": 1.02 * max(sizes) / 2**30}

    def _directory(self, policy: Policy, folder: Path) -> str:
        """Return the directory of the model for the vllm engine."""
        if not self.recipe.random_weights:
            return self.recipe.model
        return str(save_random_model(partial(self.bench.random_model, "cpu"), policy, folder))

    def _sample_plain(self, points: Sequence[Point], folder: Path) -> Iterator[None]:
        from rollout.vllm.plain import time_plain_vllm

        recipe, rollout = self.recipe, self.recipe.rollout
        self.shown.tell(PLAIN)
        _free_memory()
        options: dict[str, Any] = {"dtype": recipe.dtype, "max_num_seqs": max(recipe.batch)}
        if not torch.cuda.is_available():
            options["block_size"] = BLOCK["cpu"]  # as the plugin; the pool is counted in these blocks
        options |= {"max_model_len": max(recipe.length), "tensor_parallel_size": rollout.tensor_parallel}
        size = self._pool().get("kv_cache_gb", rollout.kv_cache_gb)
        if size is not None:
            options["kv_cache_memory_bytes"] = int(size * 2**30)
        else:
            options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        prompts = [self._prompts(point.size) for point in points]
        model = self._directory(next(p for p in self.prepared.policies if p.name == "full"), folder)
        for point, lengths in zip(points, time_plain_vllm(model, prompts, recipe.length, **options), strict=True):
            self._done(point, {"lengths": lengths})
            yield

    def _compact(self, points: Sequence[Point]) -> Iterator[None]:
        if not points:
            return
        full = next(policy for policy in self.prepared.policies if policy.name == "full")
        with engines(self.bench.live())(full) as engine:
            for point in points:
                self.shown.tell(str(point))
                self._done(point, attempted(partial(self._compacted, engine, point)))
                yield

    def _compacted(self, engine: Any, point: Point) -> Line:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        tokens = torch.randint(self.prepared.config.vocab_size, (point.size,), generator=generator).tolist()
        config: Any = point.cache
        starter = tokens[:STUDY_PROMPT]
        prompts = ContextPrompts(
            repeat=starter,
            requests=[starter] * len(REQUESTS),
            questions=starter,
            starters=lambda answer: [starter] * MOST_QUESTIONS,
            summaries=dict.fromkeys(SUMMARIES, starter),
        )
        if self.number == 0 and config.between(point.size) > WARM_UP_CONTEXT:  # a shorter context first, as a warm-up
            short = config.first + config.last + WARM_UP_CONTEXT
            time_context(engine, tokens[:short], config, prompts)
        return dataclasses.asdict(time_context(engine, tokens, config, prompts))


def _free_memory() -> None:
    """Give unused memory back to the GPU, so that vLLM finds it free."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a GPU


def attempted(work: Callable[[], Line]) -> Line:
    """Return the line that `work` returns, or one that says that the GPU's memory did not suffice."""
    try:
        return work()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"failure": OUT_OF_MEMORY}


def _observed(engine: Any) -> Any:
    """Return a context manager in which a vLLM engine reports its steps. The hf engine always does (None)."""
    if getattr(engine, "llm", None) is None:
        return None
    from rollout.vllm.observed import observed

    return observed(engine.llm)
