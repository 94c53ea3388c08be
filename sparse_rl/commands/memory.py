"""What a run will take, from the recipe and the model's configuration alone: nothing is loaded.

Bytes throughout. `sparse-rl doctor RECIPE` prints it. Each component says what it holds, and what it takes for a
moment; here it is added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollout.context.memory import compaction_bytes, context_bytes, reading_bytes, reference_queries
from rollout.evaluation.contexts import label
from rollout.vllm.beside import beside_cache, held_head, pool_bytes
from rollout.vllm.compacting import folded_bytes, folded_rows
from sparse_rl.attention.families import cache_shape
from sparse_rl.attention.interface import Replayed
from sparse_rl.attention.kernels.masked import mask_bytes
from sparse_rl.commands.machine import device_memory, show
from sparse_rl.commands.prepared import cache_configs
from sparse_rl.commands.sampling import engine_arguments
from sparse_rl.data.config import DataConfig
from sparse_rl.methods.config import PolicyConfig
from sparse_rl.methods.kvpop.scorers.registry import sketch_scorer
from sparse_rl.models.known import load_shape
from sparse_rl.models.weights import meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes, query_bytes, state_bytes
from sparse_rl.policies.registry import make_policy
from sparse_rl.recipe import KVpopRecipe, Recipe, SFTRecipe, SweptRecipe, TaughtRecipe, TrainRecipe
from sparse_rl.trace.record import trace_bytes
from trainer.config import LaunchConfig
from trainer.memory import activation_bytes, count_parameters, lora_parameters, training_state

ASSUMED_PROMPT = 512  # tokens, where a recipe does not bound its prompts
ASSUMED_LENGTH = 4096  # of a row, where a recipe does not bound it
TIGHT = 0.9  # share of the memory above which a fit is called tight


@dataclass(frozen=True)
class Item:
    """Bytes of one process, on its device and in host memory. `when`: always, update, sampling, or avoided."""

    name: str
    device: int = 0
    host: int = 0
    when: str = "always"
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What one process of a recipe takes."""

    parameters: int
    items: list[Item] = field(default_factory=list)

    @property
    def device(self) -> int:
        """The peak: what is always there, and the larger of the two phases (sampling and update do not overlap)."""
        by = {when: sum(item.device for item in self.items if item.when == when) for when in ("update", "sampling")}
        return sum(item.device for item in self.items if item.when == "always") + max(by.values())

    @property
    def host(self) -> int:
        return sum(item.host for item in self.items if item.when != "avoided")


@dataclass(frozen=True)
class Model:
    """What is known of the recipe's model: its configuration, parameters, and the bytes of a number in the forward."""

    config: Any
    parameters: int
    itemsize: int

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(layers, kv heads, head dim)"""
        return cache_shape(self.config)

    @property
    def bytes(self) -> int:
        return self.parameters * self.itemsize


def plan(recipe: Recipe, config: Any, cuda: bool | None = None) -> Plan:
    """The memory of a recipe whose model has this configuration. `cuda`: runs on a GPU; None: as this machine has."""
    skeleton = meta_model(config)
    model = Model(config, count_parameters(skeleton), ITEMSIZE[recipe.dtype])
    cuda = device_memory() is not None if cuda is None else cuda
    engine = _engine_items(recipe, model, cuda)
    if isinstance(recipe, TrainRecipe):
        return _training_plan(recipe, model, skeleton, engine, cuda)
    return Plan(model.parameters, _evaluation_items(recipe.expect(SweptRecipe), model, engine, cuda))


def _evaluation_items(recipe: SweptRecipe, model: Model, engine: list[Item], cuda: bool) -> list[Item]:
    """The points of a sweep run one after another: the largest is counted, the others are shown."""
    weights = [Item("weights", model.bytes, note=recipe.dtype)]
    items = engine or weights
    prompts = [prompt_tokens(data) for data in recipe.prompt_sources().values()] or recipe.prompt_bounds()
    prompt = max(tokens or ASSUMED_PROMPT for tokens in prompts)
    at_once = min(recipe.rollout.max_batch, recipe.sequences() or recipe.rollout.max_batch)
    if recipe.prompt_caches():
        later = [replace(item, when="avoided", note="loaded once all contexts are compacted") for item in engine]
        return weights + _context_items(recipe, model, prompt, at_once) + later
    caches = cache_configs(recipe)
    points = [_cache_items(recipe, model, cache, prompt, at_once, bool(engine), cuda) for cache in caches]
    largest = max(points, key=lambda point: sum(item.device for item in point))
    for point in points:
        items += point if point is largest else [replace(item, when="avoided") for item in point]
    return items


def _context_items(recipe: SweptRecipe, model: Model, tokens: int, at_once: int) -> list[Item]:
    """Contexts that are compacted one after another, and what is asked behind them: the largest of all compactions, and
    of what is done to a context in turn.
    """
    shape, heads, configs = model.cache_shape, model.config.num_attention_heads, recipe.prompt_caches()
    (_, kv_heads, head_dim), group = shape, heads // model.cache_shape[1]
    one = cache_bytes(1, *shape, model.itemsize) // 2  # of a query in all layers and kv heads
    asked = [reference_queries(config, tokens, group) for config in configs]
    drawn = max(min(count, config.most_queries) for count, config in zip(asked, configs, strict=True))
    counts = {label(config): config.first + config.last + config.kept(tokens) for config in configs}
    most, own = max(counts.values()), ASSUMED_PROMPT + recipe.sampling().max_tokens
    left = ", ".join(f"{name} {show(context_bytes(count, *shape, model.itemsize))}" for name, count in counts.items())
    reading = reading_bytes(tokens, heads) + max(asked) * one
    fits = max(compaction_bytes(config, tokens, group, kv_heads, head_dim) for config in configs)
    answers = at_once * cache_bytes(own, *shape, model.itemsize)
    answers += at_once * cache_bytes(most + own, 1, kv_heads, head_dim, model.itemsize)
    note = f"estimate: a piece's masks; {max(asked)} queries of each kv head, before some are drawn"
    turns = [Item("reading", reading, when="avoided", note=note)]
    note = "of one layer and part, in float64; of many queries one kv head after another"
    turns.append(Item("compaction", fits, when="avoided", note=note))
    note = f"questions of {ASSUMED_PROMPT} tokens and their answers; one layer's joined to the context's"
    turns.append(Item(f"KV cache of {at_once}", answers, when="avoided", note=note))
    largest = max(turns, key=lambda item: item.device)
    return [
        Item("context", context_bytes(tokens, *shape, model.itemsize), when="sampling", note=f"{tokens} tokens, whole"),
        Item("reference queries", drawn * one, when="sampling", note=f"{drawn} of each kv head"),
        Item("compacted context", context_bytes(most, *shape, model.itemsize), when="sampling", note=left),
        *(replace(item, when="sampling") if item is largest else item for item in turns),
    ]


def _training_plan(recipe: TrainRecipe, model: Model, skeleton: Any, engine: list[Item], cuda: bool) -> Plan:
    training, launch, adapters = recipe.training, recipe.launch, recipe.lora is not None
    parameters = model.parameters
    trainable = lora_parameters(skeleton, recipe.lora) if recipe.lora is not None else parameters
    if isinstance(recipe, KVpopRecipe):
        scorers = _scorer_parameters(recipe.cache, model)
        trainable, parameters = trainable * recipe.kvpop.train_base + scorers, parameters + scorers
    stored = model.itemsize if launch.zero_stage or adapters else 4  # as trainer.arguments.weights_dtype has it
    state = training_state(parameters, trainable, itemsize=stored, adapters=adapters, launch=launch)
    kept = ("float32" if stored == 4 else recipe.dtype) + (f", ZeRO-{launch.zero_stage}" if launch.zero_stage else "")
    notes = {"weights": kept, "optimizer": "AdamW" + (", offloaded" if launch.offload else "")}
    items = [Item(name, device, host, note=notes.get(name, "")) for name, (device, host) in state.items()]
    if stored > model.itemsize:
        copies = parameters * model.itemsize
        items.append(Item("weights under autocast", copies, when="update", note=f"their {recipe.dtype} copies"))
    prompt = prompt_tokens(recipe.data)
    rows, length = training.per_device_train_batch_size, recipe.longest_row(prompt) or ASSUMED_LENGTH
    with_or_without = "with" if training.gradient_checkpointing else "without"
    held = activation_bytes(
        model.config, rows * length, model.itemsize, training.gradient_checkpointing, isinstance(recipe, SFTRecipe)
    )
    note = f"estimate, {rows} x {length} tokens, {with_or_without} checkpointing"
    items.append(Item("activations", held, when="update", note=note))
    if isinstance(recipe, TaughtRecipe):
        items += _teacher_items(recipe, replace(model, parameters=parameters))
    if isinstance(recipe, KVpopRecipe):
        items += _held(recipe.cache, "learned_view", _replayed(recipe, model, prompt, length, cuda))
    copy = parameters * model.itemsize
    items += [Item(name, copy, note=note) for name, note in recipe.further_models(bool(engine))]
    if recipe.rollout is not None:
        items += _sampling_items(recipe, model, engine, prompt, length, cuda)
    return Plan(parameters, items)


def _sampling_items(
    recipe: TrainRecipe, model: Model, engine: list[Item], prompt: int, length: int, cuda: bool
) -> list[Item]:
    """The engine's caches, and the traces that training replays."""
    items: list[Item] = []
    if recipe.launch.zero_stage == 3 and not engine:
        note = "ZeRO-3 samples from whole weights"
        items.append(Item("gathered weights", model.bytes, when="sampling", note=note))
    rollout, sequences = recipe.rollout, recipe.sequences_sampled()
    assert rollout is not None
    at_once = min(rollout.max_batch, sequences)
    items += engine
    for cache in cache_configs(recipe):
        items += _cache_items(recipe, model, cache, prompt, at_once, bool(engine), cuda)
    if recipe.keeps_traces():
        layers, kv_heads, _ = model.cache_shape
        traces, dense = (
            trace_bytes(layers, kv_heads, length, sequences, max(c.recorded for c in cache_configs(recipe))),
            mask_bytes(sequences, kv_heads, length, layers),
        )
        items.append(Item("traces", host=traces, note=f"{sequences} sequences of {length} tokens"))
        replayed = _replayed(recipe, model, prompt, length, cuda)
        for cache in cache_configs(recipe):
            items += _held(cache, "view", replayed)
        note = "what the traces replace; not allocated"
        items.append(Item("dense masks instead", host=dense, when="avoided", note=note))
    return items


def _teacher_items(recipe: TaughtRecipe, model: Model) -> list[Item]:
    """A teacher in memory; nothing for one that has been written down."""
    if recipe.taught_by.teacher_cache is not None:
        return []
    own, whole = recipe.taught_by.teacher is None, recipe.launch.zero_stage < 3
    parameters = model.parameters if own else count_parameters(meta_model(load_shape(recipe.teacher_model)))
    held = parameters * model.itemsize // (1 if whole else recipe.launch.processes)
    return [Item("teacher", held, note=recipe.dtype + ("" if whole else ", in shards"))]


def _held(cache: PolicyConfig, view: Literal["view", "learned_view"], replayed: Replayed) -> list[Item]:
    """What a view of the cache's method holds in training."""
    return [Item(name, size, when="update", note=note) for name, size, note in cache.part(view).holds(cache, replayed)]


def _replayed(recipe: Any, model: Model, prompt: int, length: int, cuda: bool) -> Replayed:
    layers, kv_heads, head_dim = model.cache_shape
    return Replayed(
        rows=recipe.training.per_device_train_batch_size,
        prompt=prompt,
        length=length,
        heads=model.config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=1 if recipe.training.gradient_checkpointing else layers,
        kernel=recipe.replay.attention_kernel,
        itemsize=8 if computes_exactly(recipe, cuda) else model.itemsize,
        model_itemsize=model.itemsize,
        cuda=cuda,
    )


def _scorer_parameters(cache: Any, model: Model) -> int:
    layers, heads, dim = model.cache_shape
    scorer = sketch_scorer(cache.scorer, heads=heads, dim=dim)
    return layers * sum(weight.numel() for weight in scorer.parameters())


def _engine_items(recipe: Recipe, model: Model, cuda: bool) -> list[Item]:
    """What vllm holds: its own weights, and a pool for keys and values. Nothing for hf, which has neither."""
    from rollout.choice import choose_engine

    rollout = recipe.rollout
    if rollout is None or choose_engine(rollout, model.config, cache_configs(recipe), cuda)[0] == "hf":
        return []
    own = -(-model.bytes // rollout.tensor_parallel)
    when, note = "sampling" if rollout.sleep else "always", f"{recipe.dtype}, its own copy"
    kept = own if rollout.sleep and recipe.kind == "distill" else 0  # grpo replaces them after each sleep
    size: dict[str, Any] = {
        "itemsize": model.itemsize,
        "max_batch": rollout.max_batch,
        "tensor_parallel": rollout.tensor_parallel,
    }
    policies = [make_policy(cache) for cache in cache_configs(recipe)]
    beside = max((beside_cache(policy, model.config, **size) for policy in policies), key=lambda b: b.requests)
    if rollout.kv_cache_gb is not None or not cuda:
        given = rollout.kv_cache_gb or 1  # as the engine has it
        pool, source = int(given * 2**30), f"kv_cache_gb {given:g}"
    else:
        total, source = device_memory() or 0, f"gpu_memory_utilization {rollout.gpu_memory_utilization:g}"
        pool = max(int(beside.share(rollout.gpu_memory_utilization, total) * total) - own, 0) if total else 0
    if (need := max(pool_bytes(policy, engine_arguments(recipe), model.config, cuda) for policy in policies)) < pool:
        pool, source = need, f"all that {rollout.max_batch} sequences can fill; {source} would be {show(pool)}"
    held = int(pool * beside.per_byte) + beside.requests
    return [
        Item("vllm: weights", own, kept, when=when, note=note),
        Item("vllm: KV pool", pool, when=when, note=source),
        Item("vllm: beside the pool", held, note="positions and the policy's memory, last queries; also in its sleep"),
        Item("vllm: sampler", beside.sampler, when="sampling", note=f"{rollout.max_batch} tokens drawn in float64"),
    ]


def _cache_items(
    recipe: Recipe,
    model: Model,
    cache: PolicyConfig,
    prompt: int,
    at_once: int,
    pooled: bool,
    cuda: bool,
    some: int | None = None,
) -> list[Item]:
    """The cache of one point; `pooled`: it is part of the engine's pool, and only shown; some: of so many layers."""
    layers, kv_heads, head_dim = model.cache_shape
    policy = make_policy(cache)
    parts = policy.by_layers(layers)
    if parts != [(policy, layers)]:
        asked = (prompt, at_once, pooled, cuda)
        return [item for part, n in parts if n for item in _cache_items(recipe, model, part.config, *asked, some=n)]
    layers = some or layers
    shape, total = (layers, kv_heads, head_dim), prompt + recipe.sampling().max_tokens
    fed = max(total - 1, prompt)  # the last token is not
    entries = policy.schedule.most_held(prompt, fed)
    wide = held_head(policy, head_dim, computes_exactly(recipe, cuda), cuda) if pooled else head_dim
    one = cache_bytes(entries + policy.summaries(entries), layers, kv_heads, wide, model.itemsize)
    full = cache_bytes(total - 1, *shape, model.itemsize)
    heads = model.config.num_attention_heads
    state = state_bytes(policy, entries, *shape) + query_bytes(policy, layers, heads, head_dim, model.itemsize)
    name = " ".join(map(str, filter(None, (policy.name, policy.parameters().get("budget")))))
    name += f" in {some} layers" if some else ""
    note = f"{name}: {entries} entries, {show(one)} a sequence; full {show(full)}"
    note += f"; heads of {wide}, with room for biases" if wide > head_dim else ""
    when = "avoided" if pooled else "sampling"
    items = [Item(f"KV cache of {at_once}", at_once * (one + state), when=when, note=note)]
    if policy.schedule.first(prompt) <= fed or policy.every_query:
        device = "cuda" if cuda else "cpu"
        found = transient_bytes(policy, at_once, entries, shape, heads // kv_heads, recipe.dtype, device, pooled)
        items += [Item(n, size, when="sampling", note=f"{name}: {how}") for n, (size, how) in found.items() if size]
    return items


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
    """Of a compaction of requests that are due together: what takes bytes, how many, and a note.

    shape : (layers, kv heads, head dim); group : query heads of a kv head. hf takes one layer at a time; of its own
    reading and scoring nothing is counted.
    """
    rows = folded_rows(entries, requests, shape, device) if vllm else requests
    once, of_layer = f"of {rows} " + ("(sequence, layer)" if vllm else "sequences of one layer"), (entries, *shape[1:])
    taken = policy.compaction_bytes(rows, *of_layer, group, device, dtype)
    if vllm:
        taken["compaction"] = (
            folded_bytes(policy, rows, *of_layer, group, dtype, device),
            "what is read and what scores it",
        )
    return {name: (size, f"{once}, {how}") for name, (size, how) in taken.items()}


def computes_exactly(recipe: Recipe, cuda: bool) -> bool:
    """Whether float32 attention is computed in float64, as it is on a CPU where a recipe says nothing else."""
    rollout = recipe.rollout
    return recipe.dtype == "float32" and not cuda and (rollout is None or rollout.exact)


def prompt_tokens(data: DataConfig) -> int:
    """Of the longest prompt; where it is not bounded, what is assumed."""
    if data.synthetic is not None:
        return 2 * data.synthetic.n + 2
    return data.max_prompt_tokens or ASSUMED_PROMPT


# ---- whether it fits -----------------------------------------------------------------------------------------------


def verdict(need: float, have: float, where: str) -> str:
    """One line: whether `need` bytes fit into `have`."""
    word = "does not fit" if need > have else "tight" if need > TIGHT * have else "fits"
    return f"{where}: {word}, about {show(need)} of {show(have)}"


def verdicts(made: Plan, launch: LaunchConfig, device: int | None, host: int) -> list[str]:
    """A line for the device and one for the host; without a GPU all processes of a machine share the host's memory."""
    local = launch.processes // launch.machines
    if device is None:
        return [
            verdict(
                local * (made.device + made.host), host, f"host memory ({local} process{'es' * (local > 1)}, no GPU)"
            )
        ]
    return [verdict(made.device, device, "GPU memory, per process"), verdict(local * made.host, host, "host memory")]
