"""The points of `sparse-rl bench`, with an estimate of their duration, and with their rows of medians."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rollout.context.config import PromptCacheConfig
from rollout.evaluation.contexts import label
from rollout.evaluation.journal import Journal, point_key, settings_of
from rollout.timing.estimate import START, Machine, context_seconds, measured_machine, sampling_seconds
from sparse_rl.analysis.evaluation import model_label
from sparse_rl.analysis.timing import QUEUED
from sparse_rl.attention.families import context_length, windows_of
from sparse_rl.attention.kernels.masked import mask_bytes
from sparse_rl.commands.machine import processor
from sparse_rl.commands.memory import computes_exactly
from sparse_rl.commands.prepared import Prepared, prepare_model, resolve, shape_of
from sparse_rl.commands.sampling import identity, load_for_sampling
from sparse_rl.config import as_mapping
from sparse_rl.errors import UserError
from sparse_rl.experts.routing import routed_experts
from sparse_rl.models.load import load_config
from sparse_rl.models.random_weights import random_model
from sparse_rl.models.weights import meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes, query_bytes, window_bytes
from sparse_rl.recipe import BenchRecipe
from sparse_rl.trace.record import trace_bytes
from trainer.memory import count_parameters
from trainer.resume import versions

PLAIN = "vllm without the plugin"
OUT_OF_MEMORY = "out of memory"
Line = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One thing to time, `repetitions` times.

    engine : name of the engine, or PLAIN
    cache : cache policy or, for contexts, settings of the compaction
    size : number of sequences that are sampled at the same time; for contexts, number of tokens
    seconds : estimated duration of all runs
    """

    engine: str
    cache: Policy | PromptCacheConfig
    size: int
    key: str
    seconds: float
    repetitions: int

    def missing(self, journal: Journal) -> list[int]:
        """Return the numbers of the runs that the journal lacks."""
        return [number for number in range(self.repetitions) if (number,) not in journal.units(self.key)]

    @property
    def group(self) -> str:
        """Name of the points that `minutes` leaves out together."""
        one_context = isinstance(self.cache, PromptCacheConfig)
        return f"contexts of {self.size:,} tokens" if one_context else f"{self.size} sequence{'s' * (self.size > 1)}"

    def __str__(self) -> str:
        if isinstance(self.cache, PromptCacheConfig):
            return f"{self.group}, {label(self.cache)}"
        return f"{self.engine if self.engine == PLAIN else self.cache.name}, {self.group}"


@dataclass
class Bench:
    """The points of one model.

    parameters : number of the model's parameters
    left_out : lengths and points that are not timed, with the reason
    journal : finished runs; None before `time_benches`
    loaded : the model, once the hf engine has sampled from it
    """

    prepared: Prepared[BenchRecipe]
    parameters: int
    points: list[Point]
    left_out: list[str]
    journal: Journal | None = field(default=None, repr=False)
    loaded: Any = field(default=None, repr=False)

    def live(self) -> Prepared[BenchRecipe]:
        """Return the prepared recipe with its model in memory, for the hf engine."""
        recipe = self.prepared.recipe
        if self.loaded is None and recipe.random_weights:
            self.loaded = self.random_model("cuda" if torch.cuda.is_available() else "cpu")
        elif self.loaded is None:
            self.loaded = load_for_sampling(recipe)
        return replace(self.prepared, recipe=recipe.with_rollout(engine="hf"), live=self.loaded)

    def random_model(self, device: str) -> Any:
        recipe = self.prepared.recipe
        return random_model(self.prepared.config, recipe.dtype, recipe.seed, device)

    def findings(self) -> dict[str, str]:
        """Return topic -> text: the lines that --dry-run prints."""
        recipe = self.prepared.recipe
        sampled = [point for point in self.points if isinstance(point.cache, Policy)]
        lines = {
            "recipe": f"{recipe.kind}, into {recipe.output_dir}",
            **self.prepared.findings,
            "weights": f"{'random, ' if recipe.random_weights else ''}{self.parameters:,} parameters, {recipe.dtype}",
        }
        if sampled:
            sizes = ", ".join(map(str, recipe.batch))
            lengths = ", ".join(f"{length:,}" for length in recipe.length)
            lines["sampling"] = (
                f"{sizes} sequences, prompts of {recipe.prompt_tokens:,} tokens, measured at {lengths} tokens"
            )
        if recipe.contexts is not None:
            lengths = ", ".join(f"{length:,}" for length in recipe.contexts.length)
            lines["contexts"] = f"{lengths} tokens, {len(recipe.contexts.points())} compactions each"
        for number, line in enumerate(self.left_out):
            lines["left out" + " " * number] = line
        total = sum(point.seconds for point in self.points)
        runs = f"{len(self.points)} points, {recipe.repetitions} runs each"
        lines["duration"] = f"about {duration(total)} ({runs}), not counting the policies' own computations"
        return lines

    def rows(self) -> list[Line]:
        """Return a row for each sampled point and length that has been measured."""
        rows = [
            row for point in self.points if isinstance(point.cache, Policy) for row in self._rows(point, point.cache)
        ]
        return [*_with_ratios(rows)]

    def context_rows(self) -> list[Line]:
        """Return a row for each context and compaction that has been measured."""
        rows = []
        for point in self.points:
            if isinstance(point.cache, Policy) or not (lines := self._lines(point)):
                continue
            row = {"model": self.prepared.recipe.model, "compaction": label(point.cache), "tokens": point.size}
            row |= {"settings": settings_of(point.cache), "runs": len(lines)}
            if any("failure" in line for line in lines):
                rows.append({**row, "failure": OUT_OF_MEMORY})
                continue
            stages = {name: [line["seconds"][name] for line in lines] for name in lines[0]["seconds"]}
            row |= {"entries": lines[0]["entries"], "seconds": {n: statistics.median(v) for n, v in stages.items()}}
            rows.append({**row, "spread": {name: spread(values) for name, values in stages.items()}})
        return rows

    def _lines(self, point: Point) -> list[Line]:
        return [] if self.journal is None else self.journal.lines(point.key)

    def _rows(self, point: Point, policy: Policy) -> Iterator[Line]:
        lines, recipe = self._lines(point), self.prepared.recipe
        for place, length in enumerate(recipe.length if lines else ()):
            row: Line = {
                "model": recipe.model,
                "engine": point.engine,
                "policy": policy.name,
                "parameters": policy.parameters(),
                "batch": point.size,
                "prompt_tokens": recipe.prompt_tokens,
                "length": length,
                "runs": len(lines),
                "memory": self._memory(policy, point.size, length),
            }
            if any("failure" in line for line in lines):
                yield {**row, "failure": OUT_OF_MEMORY}
                continue
            row |= _medians([line["lengths"][place] for line in lines], point.size, recipe.prompt_tokens)
            if length == max(recipe.length) or row["at_once"] > QUEUED * point.size:
                yield row  # if sequences queue, they reach a smaller length one after another

    def _memory(self, policy: Policy, batch: int, length: int) -> dict[str, int]:
        """Return name -> computed bytes of `batch` sequences of `length` tokens (G-KV, appendix G).

        Only the trace includes the layers with a sliding window, whose keys and values have a name of their own.
        """
        (layers, kv_heads, dim), itemsize = self.prepared.shape, ITEMSIZE[self.prepared.recipe.dtype]
        entries = batch * policy.schedule.most_held(self.prepared.recipe.prompt_tokens, length - 1)
        per_head = layers * kv_heads * entries
        queries = query_bytes(policy, layers, self.prepared.config.num_attention_heads, dim, itemsize)
        evicts = policy.schedule.evicts
        config, windows = self.prepared.config, sum(map(bool, windows_of(self.prepared.config)))
        traces = trace_bytes(
            layers, kv_heads, length, batch, policy.config.recorded, routed_experts(meta_model(config))
        )
        traces += trace_bytes(windows, kv_heads, length, batch)
        of_windows = {"sliding windows": batch * window_bytes(config, length - 1, itemsize)} if windows else {}
        return {
            "keys and values": cache_bytes(entries, layers, kv_heads, dim, itemsize),
            **of_windows,
            "scores": 4 * len(policy.entry_memory) * per_head,
            "positions": 8 * per_head if evicts else 0,
            "last queries": batch * queries,
            "trace": traces if evicts else 0,
            "dense masks instead": mask_bytes(batch, kv_heads, length, layers) if evicts else 0,
        }


def _medians(runs: Sequence[Mapping[str, Any]], batch: int, prompt: int) -> Line:
    """Return the medians of one length's runs (`Measured`, as mappings)."""
    length = runs[0]["length"]
    speeds = [batch * (length - prompt) / run["seconds"] for run in runs]
    decoding = [run for run in runs if run["decode_steps"]]
    row: Line = {"tokens_per_second": statistics.median(speeds), "spread": spread(speeds), "speeds": speeds}
    row["seconds"] = statistics.median(run["seconds"] for run in runs)
    if decoding:
        row["decode_tokens_per_second"] = statistics.median(r["decode_tokens"] / r["decode_seconds"] for r in decoding)
        row["step_ms"] = statistics.median(1e3 * r["decode_seconds"] / r["decode_steps"] for r in decoding)
        names = list(dict.fromkeys(name for run in decoding for name in run["parts"]))
        parts = {n: statistics.median(1e6 * r["parts"].get(n, 0) / r["decode_steps"] for r in decoding) for n in names}
        row["parts_us"] = parts
        if compacting := [(run["parts"]["compaction"], run) for run in decoding if run["compactions"]]:
            row["compaction_ms"] = statistics.median(1e3 * spent / run["compactions"] for spent, run in compacting)
            row["compaction_share"] = statistics.median(spent / run["decode_seconds"] for spent, run in compacting)
    row["at_once"] = statistics.median(run["at_once"] for run in runs)
    row["cache_bytes"] = max(run["cache_bytes"] for run in runs)
    peaks = [run["peak_bytes"] for run in runs if run["peak_bytes"] is not None]
    return {**row, "peak_bytes": max(peaks, default=None)}


def spread(values: Sequence[float]) -> float | None:
    """Return (greatest - smallest) / median; None for a single value."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


def _with_ratios(rows: Sequence[Line]) -> Iterator[Line]:
    """Yield the rows with `ratio_to_full`: the median, over the runs, of the speed divided by the full cache's."""
    full = {(row["batch"], row["length"]): row for row in rows if row["policy"] == "full" and row["engine"] != PLAIN}
    for row in rows:
        beside = full.get((row["batch"], row["length"]), {})
        pairs = zip(row.get("speeds", ()), beside.get("speeds", ()), strict=False)
        ratios = [own / theirs for own, theirs in pairs]
        yield {**row, **({"ratio_to_full": statistics.median(ratios)} if ratios else {})}


# ---- choice of points -----------------------------------------------------------------------------------------------


def prepare_benches(recipe: BenchRecipe) -> list[Bench]:
    """Check everything that can be checked without loading a model. Returns a bench for each model.

    Raises UserError for mistakes, and if no point is left within the recipe's minutes.
    """
    machine = measured_machine(recipe.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    benches = [_prepare(one, machine) for one in recipe.by_model()]
    if recipe.minutes is not None:
        _leave_out(benches, machine, 60 * recipe.minutes)
    return benches


def _prepare(recipe: BenchRecipe, machine: Machine, left_out: Sequence[str] = ()) -> Bench:
    config = shape_of(recipe) if recipe.random_weights else load_config(recipe.model)
    dropped: list[int] = []
    if (most := context_length(config)) is not None:
        recipe, dropped = recipe.with_lengths_below(most)
    prepared = resolve(recipe, config) if recipe.random_weights else prepare_model(recipe, config)
    recipe, exact = prepared.recipe, computes_exactly(prepared.recipe, torch.cuda.is_available())
    rollout = recipe.rollout
    if recipe.plain_vllm and rollout.engine != "vllm":
        wrong = "needs the engine vllm; install it and set rollout.engine=vllm, or remove the key"
        raise UserError(wrong, "plain_vllm")
    if recipe.parts and rollout.engine != "hf":
        raise UserError("the parts of a step are timed in the hf engine; set rollout.engine=hf", "parts")
    if rollout.tensor_parallel > 1:
        wrong = "the steps of an engine in separate processes cannot be timed; set 1"
        raise UserError(wrong, "rollout.tensor_parallel")
    parameters = count_parameters(meta_model(config))
    points = [*_sampling_points(prepared, machine, parameters, exact), *_context_points(prepared, machine, parameters)]
    too_long = [f"{length:,} tokens: the model's context length is {most:,}" for length in sorted({*dropped})]
    return Bench(prepared, parameters, points, [*left_out, *too_long])


def _sampling_points(
    prepared: Prepared[BenchRecipe], machine: Machine, parameters: int, exact: bool
) -> Iterator[Point]:
    recipe, engine = prepared.recipe, prepared.recipe.rollout.engine
    if not recipe.length:
        return
    unique = {point_key(settings_of(policy)): policy for policy in prepared.policies}
    timed: list[tuple[str, Policy]] = [(engine, policy) for policy in unique.values()]
    timed += [(PLAIN, policy) for policy in unique.values() if policy.name == "full" and recipe.plain_vllm]
    sizes = [recipe.prompt_tokens, recipe.length, recipe.parts, max(recipe.batch)]
    for name, policy in timed:
        for batch in recipe.batch:
            seconds = sampling_seconds(
                machine, prepared.config, parameters, policy, batch, recipe.prompt_tokens, max(recipe.length),
                recipe.dtype, exact,
            )  # fmt: skip
            seconds += START / len(recipe.batch) if name != "hf" else 0
            key = _key(prepared, name, batch, sizes, settings_of(policy))
            yield Point(name, policy, batch, key, recipe.repetitions * seconds, recipe.repetitions)


def _context_points(prepared: Prepared[BenchRecipe], machine: Machine, parameters: int) -> Iterator[Point]:
    recipe = prepared.recipe
    if recipe.contexts is None:
        return
    for tokens in recipe.contexts.length:
        for compaction in recipe.contexts.points():
            try:
                compaction.kept(tokens)
            except UserError as error:
                raise UserError(error.message, "contexts.length") from None
            seconds = context_seconds(machine, prepared.config, parameters, compaction, tokens)
            key = _key(prepared, tokens, settings_of(compaction))
            yield Point("hf", compaction, tokens, key, recipe.repetitions * seconds, recipe.repetitions)


def _key(prepared: Prepared[BenchRecipe], *sizes: Any) -> str:
    """Return a digest of everything that determines a point's times: model, machine, libraries, settings of the engine,
    and `sizes`.
    """
    recipe = prepared.recipe
    rollout = {key: value for key, value in as_mapping(recipe.rollout).items() if key not in ("progress", "max_batch")}
    return identity(prepared, describe_machine(), versions(), rollout, recipe.shape, recipe.random_weights, *sizes)


def _leave_out(benches: list[Bench], machine: Machine, most: float) -> None:
    """Remove the batch sizes and contexts that take longest until the rest takes at most `most` seconds.

    All caches of a batch size are removed together, so that those that stay can be compared.
    """
    while (total := sum(point.seconds for bench in benches for point in bench.points)) > most:
        groups: dict[tuple[int, bool, int], float] = {}
        for number, bench in enumerate(benches):
            for point in bench.points:
                group = (number, isinstance(point.cache, Policy), point.size)
                groups[group] = groups.get(group, 0.0) + point.seconds
        if len(groups) == 1:
            wrong = f"the smallest part takes about {duration(total)}; raise it, or lower length or repetitions"
            raise UserError(wrong, "minutes")
        number, sampled, size = longest = max(groups, key=lambda group: groups[group])
        bench = benches[number]
        recipe = bench.prepared.recipe
        dropped = next(p for p in bench.points if isinstance(p.cache, Policy) == sampled and p.size == size)
        named = f"{model_label(recipe.model)}, " if len(benches) > 1 else ""
        line = f"{named}{dropped.group}: about {duration(groups[longest])}, more than `minutes` allows"
        smaller = recipe.without_batch(size) if sampled else recipe.without_context(size)
        benches[number] = _prepare(smaller, machine, [*bench.left_out, line])


def duration(seconds: float) -> str:
    """Format a duration with one unit."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def describe_machine() -> dict[str, str]:
    """Return processor or GPU, number of threads, and the version of torch."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return {"device": device, "threads": str(torch.get_num_threads()), "torch": torch.__version__}
