"""Predict the memory of a run, in bytes, from the recipe and the model's configuration, without loading anything.

`sparse-rl doctor RECIPE` prints the plan. Each component computes its own bytes; this module adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from rollout.context.memory import (
    compaction_bytes,
    context_bytes,
    layerwise_bytes,
    reading_bytes,
    reference_queries,
    stored_queries,
    texts_read,
)
from rollout.evaluation.contexts import label
from rollout.vllm.beside import beside_cache, held_head, pool_bytes
from rollout.vllm.compacting import folded_bytes, folded_rows
from sparse_rl.attention.families import windows_of
from sparse_rl.attention.interface import Replayed
from sparse_rl.attention.kernels.masked import mask_bytes
from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.commands.machine import device_memory, show
from sparse_rl.commands.plan import Item, Plan
from sparse_rl.commands.prepared import Prepared
from sparse_rl.commands.sampling import engine_arguments
from sparse_rl.data.config import DataConfig
from sparse_rl.data.retrieval import Retrieval
from sparse_rl.experts.routing import routed_experts
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.models.known import load_shape
from sparse_rl.models.weights import meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes, query_bytes, state_bytes, window_bytes
from sparse_rl.recipe import KVpopRecipe, Recipe, SFTRecipe, TaughtRecipe, TrainRecipe
from sparse_rl.trace.record import trace_bytes
from trainer.memory import activation_bytes, count_parameters, lora_parameters, training_state

ASSUMED_PROMPT = 512  # tokens in a prompt, if the recipe does not bound its prompts
ASSUMED_LENGTH = 4096  # tokens in a row, if the recipe does not bound its rows


def plan(prepared: Prepared, cuda: bool | None = None) -> Plan:
    """Return the memory plan of a resolved recipe on a GPU (`cuda`) or a CPU; by default, on what this machine has."""
    cuda = device_memory() is not None if cuda is None else cuda
    return (_Training if isinstance(prepared.recipe, TrainRecipe) else _Evaluation)(prepared, cuda).plan()


class _Process:
    """Memory of one process: its model, its engine, and the engine's caches."""

    def __init__(self, prepared: Prepared, cuda: bool) -> None:
        self.recipe, self.config, self.shape = prepared.recipe, prepared.config, prepared.shape
        self.policies, self.cuda = prepared.policies, cuda
        self.windows = list(filter(None, windows_of(self.config)))  # of the layers that have one, in tokens
        self.heads, self.itemsize = self.config.num_attention_heads, ITEMSIZE[self.recipe.dtype]
        self.skeleton = meta_model(self.config)
        self.parameters = count_parameters(self.skeleton)
        self.weights = self.parameters * self.itemsize
        self.exact = computes_exactly(self.recipe, cuda)
        rollout = self.recipe.rollout
        self.vllm = rollout is not None and rollout.engine == "vllm"

    def engine_items(self) -> list[Item]:
        """Return the items of the vllm engine, such as its copy of the weights and its KV pool. Empty for hf."""
        if not self.vllm:
            return []
        recipe, rollout = self.recipe, self.recipe.rollout
        own = -(-self.weights // rollout.tensor_parallel)
        when, note = "sampling" if rollout.sleep else "always", f"{recipe.dtype}, its own copy"
        kept = own if rollout.sleep and recipe.kind == "distill" else 0  # grpo replaces the weights after each sleep
        size: dict[str, Any] = {
            "itemsize": self.itemsize,
            "max_batch": rollout.max_batch,
            "tensor_parallel": rollout.tensor_parallel,
        }
        buffers = (beside_cache(policy, self.config, **size) for policy in self.policies)
        beside = max(buffers, key=lambda beside: beside.requests)
        if rollout.kv_cache_gb is not None or not self.cuda:
            gib = rollout.kv_cache_gb or 1  # the engine's default
            pool, source = int(gib * 2**30), f"kv_cache_gb {gib:g}"
        else:
            total, source = device_memory() or 0, f"gpu_memory_utilization {rollout.gpu_memory_utilization:g}"
            pool = max(int(beside.share(rollout.gpu_memory_utilization, total) * total) - own, 0) if total else 0
        arguments = engine_arguments(recipe)
        need = max(pool_bytes(policy, arguments, self.config, self.cuda) for policy in self.policies)
        if need < pool:
            pool, source = need, f"the most that {rollout.max_batch} sequences can fill; {source} would be {show(pool)}"
        held = int(pool * beside.per_byte) + beside.requests
        note_beside = "positions, the policy's state and last queries; held during sleep too"
        return [
            Item("vllm: weights", own, kept, when=when, note=note),
            Item("vllm: KV pool", pool, when=when, note=source),
            Item("vllm: beside the pool", held, note=note_beside),
            Item(
                "vllm: sampler", beside.sampler, when="sampling", note=f"{rollout.max_batch} tokens sampled in float64"
            ),
        ]

    def cache_items(self, policy: Policy, prompt: int, at_once: int, some: int | None = None) -> list[Item]:
        """Return the items of the cache of `at_once` sequences, without the layers that have a sliding window. With
        vllm they are not counted: the pool contains them.

        prompt : number of tokens in each prompt
        some : number of layers that `policy` covers, if it is a part of a layered policy
        """
        layers, kv_heads, head_dim = self.shape
        parts = policy.by_layers(layers)
        if parts != [(policy, layers)]:
            return [item for part, n in parts if n for item in self.cache_items(part, prompt, at_once, n)]
        layers, fed = some or layers, self.fed(prompt)
        shape = (layers, kv_heads, head_dim)
        entries = policy.schedule.most_held(prompt, fed)
        wide = held_head(policy, head_dim, self.exact, self.cuda) if self.vllm else head_dim
        unit_bytes = cache_bytes(entries + policy.summaries(entries), layers, kv_heads, wide, self.itemsize)
        full = show(cache_bytes(fed, *shape, self.itemsize))
        if self.windows and not some:
            with_windows = cache_bytes(fed, *shape, self.itemsize) + window_bytes(self.config, fed, self.itemsize)
            full += f", {show(with_windows)} with sliding windows"
        state = state_bytes(policy, entries, *shape)
        state += query_bytes(policy, layers, self.heads, head_dim, self.itemsize)
        name = " ".join(map(str, filter(None, (policy.name, policy.parameters().get("budget")))))
        name += f" in {some} layers" if some else ""
        note = f"{name}: {entries} entries, {show(unit_bytes)} per sequence; a full cache: {full}"
        note += f"; heads of {wide}, which include biases" if wide > head_dim else ""
        when = "avoided" if self.vllm else "sampling"
        items = [Item(f"KV cache of {at_once}", at_once * (unit_bytes + state), when=when, note=note)]
        if policy.schedule.first(prompt) <= fed or policy.every_query:
            device, group = "cuda" if self.cuda else "cpu", self.heads // kv_heads
            transients = transient_bytes(policy, at_once, entries, shape, group, self.recipe.dtype, device, self.vllm)
            items += [
                Item(n, size, when="sampling", note=f"{name}: {how}") for n, (size, how) in transients.items() if size
            ]
        return items

    def fed(self, prompt: int) -> int:
        """Return the maximum number of tokens that a cache holds after prompts of `prompt` tokens."""
        return max(prompt + self.recipe.sampling().max_tokens - 1, prompt)  # the last token is never fed

    def window_items(self, tokens: int, at_once: int) -> Iterator[Item]:
        """Yield the item of the layers with a sliding window, if there are any, for `at_once` sequences of `tokens`
        tokens.
        """
        if self.windows:
            unit_bytes, entries = window_bytes(self.config, tokens, self.itemsize), min(max(self.windows), tokens)
            note = f"{self.window_layers}: {entries} entries, {show(unit_bytes)} per sequence, under any policy"
            yield Item(f"sliding windows of {at_once}", at_once * unit_bytes, when="sampling", note=note)

    @property
    def window_layers(self) -> str:
        """Description of the layers with a sliding window."""
        return f"{len(self.windows)} layers with a window of {max(self.windows)} tokens"


class _Evaluation(_Process):
    """Memory of an evaluation, or of another recipe that samples without training."""

    def plan(self) -> Plan:
        """Return the memory plan. The caches of a sweep are used in turn: all are shown, only the largest counts."""
        recipe: Any = self.recipe  # every kind that samples without training has `sequences`
        engine = self.engine_items()
        weights = [Item("weights", self.weights, note=recipe.dtype)]
        prompts = [prompt_tokens(data) for data in recipe.prompt_sources().values()] or recipe.prompt_bounds()
        prompt = max(tokens or ASSUMED_PROMPT for tokens in prompts)
        at_once = min(recipe.rollout.max_batch, recipe.sequences() or recipe.rollout.max_batch)
        if recipe.prompt_caches():
            later = [replace(item, when="avoided", note="loaded after all contexts are compacted") for item in engine]
            return Plan(self.parameters, weights + self.context_items(prompt, at_once) + later)
        items = engine or weights
        points = [self.cache_items(policy, prompt, at_once) for policy in self.policies]
        largest = max(points, key=lambda point: sum(item.device for item in point))
        for point in points:
            items += point if point is largest else [replace(item, when="avoided") for item in point]
        return Plan(self.parameters, [*items, *self.window_items(self.fed(prompt), at_once)])

    def context_items(self, tokens: int, at_once: int) -> list[Item]:
        """Return the items of contexts of `tokens` tokens, compacted one after another, and of `at_once` questions.

        The phases (reading, compaction, answering) do not overlap: all are shown, only the largest is counted.
        """
        shape, configs = self.shape, self.recipe.prompt_caches()
        (_, kv_heads, head_dim), group = shape, self.heads // shape[1]
        unit_bytes = cache_bytes(1, *shape, self.itemsize) // 2  # bytes of one query in all layers and kv heads
        query_counts = [reference_queries(config, tokens, group) for config in configs]
        stored = max(stored_queries(config, tokens, group) for config in configs)
        counts = {label(config): config.first + config.last + config.kept(tokens) for config in configs}
        most, own = max(counts.values()), ASSUMED_PROMPT + self.recipe.sampling().max_tokens
        compacted_sizes = (
            f"{name} {show(context_bytes(count, *shape, self.itemsize))}" for name, count in counts.items()
        )
        answers = at_once * cache_bytes(own, *shape, self.itemsize)
        answers += at_once * cache_bytes(most + own, 1, kv_heads, head_dim, self.itemsize)
        answers += at_once * window_bytes(self.config, tokens + own, self.itemsize)  # a row has its own last tokens
        texts = max(map(texts_read, configs)) * window_bytes(self.config, tokens, self.itemsize)
        phases = [
            Item(
                "reading",
                reading_bytes(tokens, self.heads) + max(query_counts) * unit_bytes + texts,
                when="avoided",
                note=f"estimate: masks of one piece; {max(query_counts)} queries per kv head before subsampling",
            ),
            Item(
                "compaction",
                max(
                    compaction_bytes(config, tokens, group, kv_heads, head_dim)
                    + layerwise_bytes(config, tokens, self.config, self.itemsize)
                    for config in configs
                ),
                when="avoided",
                note="one layer and part at a time, in float64; with many queries one kv head at a time; on_policy: "
                "also a pass over their texts",
            ),
            Item(
                f"KV cache of {at_once}",
                answers,
                when="avoided",
                note=f"questions of {ASSUMED_PROMPT} tokens, answers, and a copy of one layer joined to the context"
                + (", and sliding windows" if self.windows else ""),
            ),
        ]
        largest = max(phases, key=lambda item: item.device)
        whole, compacted = (context_bytes(count, *shape, self.itemsize) for count in (tokens, most))
        return [
            Item("context", whole, when="sampling", note=f"{tokens} tokens, before compaction"),
            Item(
                "reference queries",
                stored * unit_bytes,
                when="sampling",
                note=f"{stored} per kv head",
            ),
            Item("compacted context", compacted, when="sampling", note=", ".join(compacted_sizes)),
            *self.context_windows(tokens),
            *(replace(item, when="sampling") if item is largest else item for item in phases),
        ]

    def context_windows(self, tokens: int) -> Iterator[Item]:
        """Yield the item of a context's layers with a sliding window, if there are any. No compaction changes them."""
        if self.windows:
            size, entries = window_bytes(self.config, tokens, self.itemsize), min(max(self.windows), tokens)
            note = f"{self.window_layers}: the last {entries} tokens, before and after a compaction"
            yield Item("sliding windows of the context", size, when="sampling", note=note)


class _Training(_Process):
    """Memory of a training run, and of the engine that the run samples from."""

    def plan(self) -> Plan:
        recipe: Any = self.recipe
        engine = self.engine_items()
        training, launch, adapters = recipe.training, recipe.launch, recipe.lora is not None
        self.prompt = prompt_tokens(recipe.data)
        self.length = recipe.longest_row(self.prompt) or ASSUMED_LENGTH
        parameters = self.parameters
        trainable = lora_parameters(self.skeleton, recipe.lora) if adapters else parameters
        if isinstance(recipe, KVpopRecipe):
            cache: Any = recipe.cache
            layers, heads, dim = self.shape
            scorers = layers * count_parameters(sketch_scorer(cache.scorer, heads=heads, dim=dim))
            trainable, parameters = trainable * recipe.kvpop.train_base + scorers, parameters + scorers
        copy = parameters * self.itemsize
        stored = self.itemsize if launch.zero_stage or adapters else 4  # same rule as trainer.arguments.weights_dtype
        state = training_state(parameters, trainable, itemsize=stored, adapters=adapters, launch=launch)
        dtype = "float32" if stored == 4 else recipe.dtype
        notes = {
            "weights": dtype + (f", ZeRO-{launch.zero_stage}" if launch.zero_stage else ""),
            "optimizer": "AdamW" + (", offloaded" if launch.offload else ""),
        }
        items = [Item(name, device, host, note=notes.get(name, "")) for name, (device, host) in state.items()]
        if stored > self.itemsize:
            items.append(Item("weights under autocast", copy, when="update", note=f"their {recipe.dtype} copies"))
        rows, checkpointing = training.per_device_train_batch_size, training.gradient_checkpointing
        logits = isinstance(recipe, SFTRecipe)
        held = activation_bytes(self.skeleton, rows * self.length, self.itemsize, checkpointing, logits)
        note = f"estimate, {rows} x {self.length} tokens, {'with' if checkpointing else 'without'} checkpointing"
        items.append(Item("activations", held, when="update", note=note))
        if isinstance(recipe, TaughtRecipe) and recipe.taught_by.teacher_cache is None:
            items.append(self.teacher(recipe, copy))
        if isinstance(recipe, KVpopRecipe):
            items += self.view_items(cache, "learned_view")
        items += [Item(name, copy, note=note) for name, note in recipe.further_models(bool(engine))]
        if recipe.rollout is not None:
            items += self.sampling_items(engine)
        return Plan(parameters, items)

    def teacher(self, recipe: TaughtRecipe, copy: int) -> Item:
        """Return the item of a teacher held in memory. By default it is a copy of the student, of `copy` bytes."""
        whole, held = recipe.launch.zero_stage < 3, copy
        if recipe.taught_by.teacher is not None:
            held = count_parameters(meta_model(load_shape(recipe.teacher_model))) * self.itemsize
        held //= 1 if whole else recipe.launch.processes
        return Item("teacher", held, note=recipe.dtype + ("" if whole else ", in shards"))

    def sampling_items(self, engine: list[Item]) -> list[Item]:
        """Return the items of the engine, the engine's cache, and the traces that training replays."""
        recipe, items, sequences = self.recipe, list(engine), self.recipe.sequences_sampled()
        (policy,), (layers, kv_heads, _) = self.policies, self.shape
        if recipe.launch.zero_stage == 3 and not engine:
            note = "ZeRO-3 gathers the weights for sampling"
            items.append(Item("gathered weights", self.weights, when="sampling", note=note))
        at_once = min(recipe.rollout.max_batch, sequences)
        items += [*self.cache_items(policy, self.prompt, at_once), *self.window_items(self.fed(self.prompt), at_once)]
        if not recipe.keeps_traces():
            items += self.view_items(None, "view")
        else:
            experts = routed_experts(self.skeleton)
            traces = trace_bytes(layers, kv_heads, self.length, sequences, policy.config.recorded, experts)
            traces += trace_bytes(len(self.windows), kv_heads, self.length, sequences)
            dense = mask_bytes(sequences, kv_heads, self.length, layers)
            note = f"{sequences} sequences of {self.length} tokens" + (f", {experts} experts each" if experts else "")
            items.append(Item("traces", host=traces, note=note))
            items += self.view_items(policy.config, "view")
            note = "replaced by the traces; not allocated"
            items.append(Item("dense masks instead", host=dense, when="avoided", note=note))
        return items

    def view_items(self, cache: PolicyConfig | None, view: Literal["view", "learned_view"]) -> list[Item]:
        """Return the items that a view of the cache's method holds in training, and a view of sliding windows.

        With gradient checkpointing, layers are replayed one at a time, so only the view that holds more is counted.

        cache : the cache whose evictions are replayed; None if no evictions are
        """
        layers, kv_heads, head_dim = self.shape
        alone = self.recipe.training.gradient_checkpointing
        replayed = Replayed(
            rows=self.recipe.training.per_device_train_batch_size,
            prompt=self.prompt,
            length=self.length,
            heads=self.heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=1 if alone else layers,
            kernel=self.recipe.replay.attention_kernel,
            itemsize=8 if self.exact else self.itemsize,
            model_itemsize=self.itemsize,
            cuda=self.cuda,
        )
        held = [] if cache is None else cache.part(view).holds(cache, replayed)
        if self.windows:
            of_windows = WindowedView.holds(
                max(self.windows), replace(replayed, layers=1 if alone else len(self.windows))
            )
            most = max(held, of_windows, key=lambda items: sum(size for _, size, _ in items))
            held = most if alone else [*held, *of_windows]
        return [Item(name, size, when="update", note=note) for name, size, note in held]


def transient_bytes(
    policy: Policy,
    requests: int,
    entries: int,
    shape: tuple[int, int, int],
    group: int,
    dtype: str,
    device: str,
    vllm: bool,
) -> dict[str, tuple[int, str]]:
    """Return name -> (temporary bytes, note) for one compaction of `requests` requests by the vllm or the hf engine.

    The hf engine compacts one layer at a time; its buffers for reading and scoring entries are not counted.

    entries : maximum number of entries of a request in each kv head
    shape : (layers, kv heads, head dim)
    group : number of query heads per kv head
    """
    rows = folded_rows(entries, requests, shape, device) if vllm else requests
    once, of_layer = f"of {rows} " + ("(sequence, layer)" if vllm else "sequences of one layer"), (entries, *shape[1:])
    taken = policy.compaction_bytes(rows, *of_layer, group, device, dtype)
    if vllm:
        taken["compaction"] = (
            folded_bytes(policy, rows, *of_layer, group, dtype, device),
            "the entries read, and the scoring buffers",
        )
    return {name: (size, f"{once}, {how}") for name, (size, how) in taken.items()}


def computes_exactly(recipe: Recipe, cuda: bool) -> bool:
    """True if float32 attention is computed in float64, which is the default on a CPU."""
    rollout = recipe.rollout
    return recipe.dtype == "float32" and not cuda and (rollout is None or rollout.exact)


def prompt_tokens(data: DataConfig) -> int:
    """Return the number of tokens of the longest prompt, or ASSUMED_PROMPT if prompts are not bounded."""
    if (task := data.synthetic) is not None and task.task == "retrieval":
        return Retrieval(task.facts, task.restated, task.filler).document_tokens + 2
    if task is not None:
        return 2 * task.n + 2
    return data.max_prompt_tokens or ASSUMED_PROMPT
