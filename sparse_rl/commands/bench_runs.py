"""Times a model for `sparse-rl bench`: opens engines, samples and compacts, and makes rows of medians."""

from __future__ import annotations

import gc
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from rollout.context.reader import MOST_QUESTIONS, REQUESTS, SUMMARIES, ContextPrompts
from rollout.hf import HFEngine
from rollout.measure.contexts import label
from rollout.measure.journal import settings_of
from rollout.measure.timing import Measured, time_context, time_sampling
from rollout.vllm.memory import pool_bytes
from sparse_rl.analysis.timing import QUEUED
from sparse_rl.attention.families import context_length
from sparse_rl.errors import UserError
from sparse_rl.models.load import load_config
from sparse_rl.models.random_weights import attach_random_scorers, random_model, save_random_model
from sparse_rl.models.weights import meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.make import make_policy
from sparse_rl.progress import Stage
from sparse_rl.recipe import BenchRecipe, Run
from sparse_rl.recipe.sampling import engines, load_for_sampling
from sparse_rl.temporary import temporary_folder
from trainer.memory import count_parameters

OUT_OF_MEMORY = "out of memory"
WARM_UP = 8  # tokens that an engine samples before it is timed
WARM_UP_CONTEXT = 128  # tokens of a context that is compacted before one is timed
STUDY_PROMPT = 16  # tokens of each prompt about a context
Row = dict[str, Any]


def prepare_benches(recipe: BenchRecipe) -> list[Bench]:
    """Check what can be checked without loading a model. Returns a bench for each model."""
    return [Bench(_prepare(one)) for one in recipe.by_model()]


def _prepare(recipe: BenchRecipe) -> Run[BenchRecipe]:
    config = recipe.load_shape() if recipe.random_weights else load_config(recipe.model)
    most = context_length(config)
    for tokens, compaction in recipe.timed_contexts():
        if most is not None and tokens > most:
            wrong = f"{tokens:,} exceeds the model's context length of {most:,} tokens; lower this value"
            raise UserError(wrong, "contexts.length")
        try:
            compaction.kept(tokens)
        except UserError as error:
            raise UserError(error.message, "contexts.length") from None
    prepared = recipe.resolve(config) if recipe.random_weights else recipe.prepare_model(config)
    rollout = prepared.recipe.rollout
    if recipe.parts and rollout.engine != "hf":
        raise UserError("the parts of a step are timed in the hf engine; set rollout.engine=hf", "parts")
    if rollout.tensor_parallel > 1:
        wrong = "the steps of an engine in separate processes cannot be timed; set 1"
        raise UserError(wrong, "rollout.tensor_parallel")
    return prepared


@dataclass
class Bench:
    """Everything that is timed with one model."""

    prepared: Run[BenchRecipe]

    def __post_init__(self) -> None:
        self.recipe, self.config = self.prepared.recipe, self.prepared.config
        self.skeleton = meta_model(self.config)
        configs = [policy.config for policy in self.prepared.policies]
        unique = [policy for at, policy in enumerate(self.prepared.policies) if policy.config not in configs[:at]]
        self.policies = unique if self.recipe.length else []
        self.full: dict[tuple[int, int], float] = {}  # (batch, length) -> tokens/s of a full cache, which comes first

    @property
    def points(self) -> int:
        return len(self.policies) * len(self.recipe.batch) + len(self.recipe.timed_contexts())

    def findings(self) -> dict[str, str]:
        """Return topic -> text: the lines that --dry-run prints."""
        recipe = self.recipe
        random = "random, " if recipe.random_weights else ""
        return {
            "recipe": f"{recipe.kind}, into {recipe.output_dir}",
            **self.prepared.findings,
            "weights": f"{random}{count_parameters(self.skeleton):,} parameters, {recipe.dtype}",
            "runs": f"{self.points} points, {recipe.repetitions} runs each",
        }

    def run(self, shown: Stage) -> Iterator[tuple[str, list[Row]]]:
        """Time everything. Yields for each point the key in bench.json of its rows, and the rows."""
        recipe, hf = self.recipe, cache(self._hf)
        with tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
            for policy in self.policies:
                opened = hf() if recipe.rollout.engine == "hf" else partial(self._vllm, Path(folder))
                with opened(policy) as engine:
                    for batch in recipe.batch:
                        shown.tell(f"{policy.name}, {batch} sequence{'s' * (batch > 1)}")
                        runs = attempted(partial(self._sampled, engine, batch))
                        yield "rows", list(self._rows(policy, batch, runs))
        if contexts := recipe.timed_contexts():
            with hf()(make_policy("full")) as engine:
                for tokens, compaction in contexts:
                    shown.tell(f"a context of {tokens:,} tokens, {label(compaction)}")
                    runs = attempted(partial(self._compacted, engine, compaction, tokens))
                    yield "contexts", [self._context_row(compaction, tokens, runs)]

    # ---- engines ----------------------------------------------------------------------------------------------------

    def _hf(self) -> Callable[[Policy], AbstractContextManager[Any]]:
        """Load the model. Returns a function that opens the hf engine for a policy."""
        recipe = self.recipe.with_rollout(engine="hf")
        random = recipe.random_weights
        device = "cuda" if torch.cuda.is_available() else "cpu"
        live = self._random_model(device) if random else load_for_sampling(recipe)
        of_policy = engines(replace(self.prepared, recipe=recipe, live=live))

        def opened(policy: Policy) -> AbstractContextManager[Any]:
            if random:
                attach_random_scorers(live, policy)
            return of_policy(policy)

        return opened

    def _vllm(self, folder: Path, policy: Policy) -> AbstractContextManager[Any]:
        gc.collect()
        torch.cuda.empty_cache()  # so that vLLM finds the memory free; does nothing without a GPU
        recipe, cuda, pool = self.recipe, torch.cuda.is_available(), {}
        if recipe.random_weights:
            recipe = replace(recipe, model=str(save_random_model(partial(self._random_model, "cpu"), policy, folder)))
        if not cuda and recipe.rollout.kv_cache_gb is None:  # room for all sequences
            arguments = recipe.engine_arguments()
            most = max(pool_bytes(other, arguments, self.config, cuda) for other in self.prepared.policies)
            pool = {"kv_cache_gb": 1.02 * most / 2**30}
        return engines(replace(self.prepared, recipe=recipe))(policy, **pool)

    def _random_model(self, device: str) -> Any:
        return random_model(self.config, self.recipe.dtype, self.recipe.seed, device)

    # ---- runs -------------------------------------------------------------------------------------------------------

    def _sampled(self, engine: Any, batch: int) -> list[list[Measured]]:
        """Return the measurements of each run, at each length. A warm-up precedes them, with a first compaction."""
        recipe, prompt, sampling = self.recipe, self.recipe.prompt_tokens, self.recipe.sampling()
        schedule, prompts = engine.policy.schedule, self._tokens(batch, prompt).tolist()
        warm_up = max(WARM_UP, schedule.first(prompt) - prompt + 2 if schedule.evicts else 0)
        engine.generate(prompts, SamplingConfig(min(warm_up, sampling.max_tokens), seed=0, ignore_eos=True))
        sample = partial(engine.generate, prompts, sampling)
        observed = None  # the hf engine always reports its steps
        if getattr(engine, "llm", None) is not None:
            from rollout.vllm.engine import steps_reported

            observed = steps_reported(engine.llm)
        measure = partial(time_sampling, sample, batch, prompt, recipe.length, detailed=recipe.parts, observed=observed)
        return [measure() for _ in range(recipe.repetitions)]

    def _compacted(self, engine: HFEngine, config: PromptCacheConfig, size: int) -> list[tuple[int, dict[str, float]]]:
        """Return the entries and the seconds of each run. The compaction of a short context precedes them."""
        tokens = self._tokens(1, size)[0].tolist()
        starter = tokens[:STUDY_PROMPT]
        prompts = ContextPrompts(
            repeat=starter,
            requests=[starter] * len(REQUESTS),
            questions=starter,
            starters=lambda answer: [starter] * MOST_QUESTIONS,
            summaries=dict.fromkeys(SUMMARIES, starter),
        )
        if config.between(size) > WARM_UP_CONTEXT:
            time_context(engine, tokens[: config.first + config.last + WARM_UP_CONTEXT], config, prompts)
        return [time_context(engine, tokens, config, prompts) for _ in range(self.recipe.repetitions)]

    def _tokens(self, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.recipe.seed)
        return torch.randint(self.config.vocab_size, (rows, columns), generator=generator)

    # ---- rows -------------------------------------------------------------------------------------------------------

    def _rows(self, policy: Policy, batch: int, runs: Sequence[Sequence[Measured]]) -> Iterator[Row]:
        recipe = self.recipe
        for place, length in enumerate(recipe.length):
            row: Row = {
                "model": recipe.model,
                "engine": recipe.rollout.engine,
                "policy": policy.name,
                "parameters": policy.parameters(),
                "batch": batch,
                "prompt_tokens": recipe.prompt_tokens,
                "length": length,
                "runs": recipe.repetitions,
            }
            if not runs:
                yield {**row, "failure": OUT_OF_MEMORY}
                continue
            row |= _medians([measured[place] for measured in runs], batch, recipe.prompt_tokens)
            if recipe.rollout.engine == "vllm" and torch.cuda.is_available():
                row["peak_bytes"] = None  # vLLM reserves its memory
            if policy.name == "full":
                self.full[batch, length] = row["tokens_per_second"]
            if (batch, length) in self.full:
                row["ratio_to_full"] = row["tokens_per_second"] / self.full[batch, length]
            if length == max(recipe.length) or row["at_once"] > QUEUED * batch:
                yield row  # if sequences queue, they reach a smaller length one after another

    def _context_row(self, config: PromptCacheConfig, tokens: int, runs: Sequence[tuple[int, dict[str, float]]]) -> Row:
        row = {"model": self.recipe.model, "compaction": label(config), "tokens": tokens}
        row |= {"settings": settings_of(config), "runs": self.recipe.repetitions}
        if not runs:
            return {**row, "failure": OUT_OF_MEMORY}
        stages = {name: [seconds.get(name, 0.0) for _, seconds in runs] for name in runs[0][1]}
        row |= {"entries": runs[0][0], "seconds": {name: median(values) for name, values in stages.items()}}
        return {**row, "spread": {name: spread(values) for name, values in stages.items()}}


def _medians(runs: Sequence[Measured], batch: int, prompt: int) -> Row:
    speeds = [batch * (run.length - prompt) / run.seconds for run in runs]
    decoding = [run for run in runs if run.decode_steps and run.decode_seconds]
    row: Row = {"tokens_per_second": median(speeds), "spread": spread(speeds), "speeds": speeds}
    row["seconds"] = median(run.seconds for run in runs)
    if decoding:
        row["decode_tokens_per_second"] = median(run.decode_tokens / run.decode_seconds for run in decoding)
        row["step_ms"] = median(1e3 * run.decode_seconds / run.decode_steps for run in decoding)
        names = list(dict.fromkeys(name for run in decoding for name in run.parts))
        row["parts_us"] = {n: median(1e6 * run.parts.get(n, 0) / run.decode_steps for run in decoding) for n in names}
        if compacting := [(run.parts.get("compaction", 0), run) for run in decoding if run.compactions]:
            row["compaction_ms"] = median(1e3 * spent / run.compactions for spent, run in compacting)
            row["compaction_share"] = median(spent / run.decode_seconds for spent, run in compacting)
    row["at_once"] = median(run.at_once for run in runs)
    row["cache_bytes"] = max(run.cache_bytes for run in runs)
    return {**row, "peak_bytes": max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None)}


def spread(values: Sequence[float]) -> float | None:
    """Return (greatest - smallest) / median; None for a single value."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


def attempted(work: Callable[[], list[Any]]) -> list[Any]:
    """Return what `work` returns, or nothing if the GPU's memory does not suffice."""
    try:
        return work()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return []


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.processor() or platform.machine()}"


def describe_machine() -> dict[str, str]:
    """Return processor or GPU, number of threads, and the version of torch."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return {"device": device, "threads": str(torch.get_num_threads()), "torch": torch.__version__}
