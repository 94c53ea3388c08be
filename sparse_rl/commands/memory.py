"""What a run will take, from the recipe and the model's configuration alone: nothing is loaded.

The caches, traces, masks, weights and the optimizer's state are counted exactly; activations are an estimate, and so is
every total that holds them. Bytes throughout. `sparse-rl doctor RECIPE` prints it.

The pure functions come first, what a recipe makes of them after. Legend: B sequences, S tokens, L layers, Hkv kv heads.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.models.load import load_config
from sparse_rl.recipe import (
    DataConfig,
    DistillRecipe,
    EvalRecipe,
    GRPORecipe,
    KVpopRecipe,
    LaunchConfig,
    LoraConfig,
    Recipe,
    ReplayedRecipe,
    SampledRecipe,
    SFTRecipe,
    TaughtRecipe,
)

if TYPE_CHECKING:
    from sparse_rl.policies import Policy

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ASSUMED_PROMPT = 512  # tokens, where a recipe does not bound its prompts
ASSUMED_SFT_LENGTH = 4096
TIGHT = 0.9  # share of the memory above which a fit is called tight


# ---- caches, traces, masks -----------------------------------------------------------------------------------------


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one sequence that holds `entries` per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


def state_bytes(policy: Policy, entries: int, layers: int, kv_heads: int) -> int:
    """What a policy and its cache remember beside keys and values: int64 positions and float32 scores, per entry."""
    return layers * kv_heads * entries * (8 + 4 * len(policy.entry_memory))


def trace_bytes(layers: int, kv_heads: int, length: int, sequences: int = 1) -> int:
    """Recorded evictions: one int32 per layer, kv head and token, in host memory."""
    return 4 * layers * kv_heads * length * sequences


def mask_bytes(sequences: int, kv_heads: int, length: int, layers: int = 1) -> int:
    """Boolean masks [B, Hkv, S, S]: of one layer, as replay attention makes them, or of all, as dense traces would."""
    return sequences * layers * kv_heads * length * length


def attention_itemsize(dtype: str, cuda: bool) -> int:
    """Bytes of a number in the attention: the dtype's, but on a CPU float32 is computed in float64."""
    return 8 if dtype == "float32" and not cuda else ITEMSIZE[dtype]


def sdpa_mask_bytes(sequences: int, kv_heads: int, length: int, itemsize: int) -> int:
    """One layer's mask in replay attention: the boolean one, and what SDPA makes of it, a bias in its own dtype."""
    return mask_bytes(sequences, kv_heads, length) * (1 + itemsize)


def tiles_bytes(sequences: int, kv_heads: int, length: int) -> int:
    """One layer's tiles in FlexAttention: positions and evict_at, the keys' order and back, and four lists of tiles."""
    from sparse_rl.attention.kernels.flex import padded
    from sparse_rl.attention.kernels.tiles import TILE

    width = padded(length)
    count = width // TILE
    return sequences * kv_heads * (width * (4 + 4 + 8) + length * 8 + 4 * 4 * (count + count**2))


def redundancy_bytes(policy: Policy, entries: int, kv_heads: int) -> int:
    """The transient of R-KV's redundancy, where a policy has it: 3 float32 [Hkv, N, N], for one sequence at a time."""
    from sparse_rl.policies.scored_window import GKV, RKV

    has = isinstance(policy, RKV) or (isinstance(policy, GKV) and policy.config.redundancy)
    return 3 * 4 * kv_heads * entries * entries if has else 0


# ---- weights and training state ------------------------------------------------------------------------------------


def meta_model(config: Any) -> Any:
    """The model of a configuration without its memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def count_parameters(model: Any) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def lora_parameters(model: Any, lora: LoraConfig) -> int:
    """Parameters of rank-r adapters: r (in + out) for every adapted linear layer.

    As PEFT has it: `all-linear` leaves out the head, other text is a pattern for whole names, a list holds last names.
    """
    from torch.nn import Linear

    def adapted(name: str, module: Any) -> bool:
        if isinstance(lora.target_modules, list):
            return any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
        if lora.target_modules == "all-linear":
            return module is not model.get_output_embeddings()
        return re.fullmatch(lora.target_modules, name) is not None

    linear = [module for name, module in model.named_modules() if isinstance(module, Linear) and adapted(name, module)]
    return sum(lora.r * (module.in_features + module.out_features) for module in linear)


def training_state(
    parameters: int, trainable: int, *, itemsize: int, adapters: bool, launch: LaunchConfig
) -> dict[str, tuple[int, int]]:
    """Weights, gradients and AdamW's state of one process: name -> (bytes on the device, bytes in host memory).

    Without DeepSpeed: AdamW keeps two float32 moments, on weights of `itemsize`; adapters are float32 beside frozen
    weights; several processes hold their gradients again as buckets. With it: a float32 master copy and two moments,
    partitioned over the processes from stage 1, gradients from stage 2, weights from stage 3 (the ZeRO paper's table).
    """
    if not launch.zero_stage:
        weights = parameters * itemsize + (4 * trainable if adapters else 0)
        gradients = (4 if adapters else itemsize) * trainable * (1 if launch.processes == 1 else 2)
        return {"weights": (weights, 0), "gradients": (gradients, 0), "optimizer": (8 * trainable, 0)}

    def share(size: int, stage: int) -> int:
        return -(-size // launch.processes) if launch.zero_stage >= stage else size

    weights = share((parameters + (trainable if adapters else 0)) * itemsize, 3)
    optimizer = share(12 * trainable, 1)
    moved = launch.offload and launch.zero_stage == 3
    return {
        "weights": (0, weights) if moved else (weights, 0),
        "gradients": (share(itemsize * trainable, 2), 0),
        "optimizer": (0, optimizer) if launch.offload else (optimizer, 0),
    }


def activation_bytes(config: Any, tokens: int, itemsize: int, checkpointing: bool, logits: bool) -> int:
    """A rough estimate of what forward and backward keep of `tokens` tokens.

    Per layer its input; and per token about 6 hidden vectors (norms, residuals), queries, keys and values twice
    (RoPE), the attention's output, 4 intermediate vectors: of one layer at a time with checkpointing, else of all.
    `logits`: the whole [tokens, vocabulary] at itemsize and twice in float32 (GRPO's fused head holds tiles only).
    """
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer = 6 * config.hidden_size + dim * (3 * heads + 4 * config.num_key_value_heads) + 4 * config.intermediate_size
    layers = config.num_hidden_layers
    kept = layers * config.hidden_size + layer if checkpointing else layers * layer
    return tokens * (kept * itemsize + (config.vocab_size * (itemsize + 8) if logits else 0))


# ---- a recipe ------------------------------------------------------------------------------------------------------


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


def plan(recipe: Recipe, config: Any, cuda: bool | None = None) -> Plan:
    """The memory of a recipe whose model has this configuration. `cuda`: runs on a GPU; None: as this machine has."""
    model = meta_model(config)
    parameters, itemsize = count_parameters(model), ITEMSIZE[recipe.dtype]
    cuda = device_memory() is not None if cuda is None else cuda
    engine: list[Item] = []
    if isinstance(recipe, SampledRecipe | EvalRecipe):
        engine = _engine_items(recipe, config, parameters * itemsize, cuda)
    if isinstance(recipe, EvalRecipe):
        items = engine or [Item("weights", parameters * itemsize, note=recipe.dtype)]
        prompt = max(_prompt_tokens(data) for data in recipe.tasks.values())
        at_once = min(recipe.rollout.max_batch, _problems(recipe) * recipe.samples)
        points = [
            _cache_items(recipe, config, block, prompt, at_once, itemsize, bool(engine)) for block in recipe.caches()
        ]
        largest = max(points, key=lambda point: sum(item.device for item in point))
        for point in points:  # those of a sweep run one after another: the others are shown, not counted
            items += point if point is largest else [replace(item, when="avoided") for item in point]
        return Plan(parameters, items)
    assert isinstance(recipe, SampledRecipe | SFTRecipe | KVpopRecipe)
    adapters, launch = recipe.lora is not None, recipe.launch
    trainable = lora_parameters(model, recipe.lora) if recipe.lora is not None else parameters
    if isinstance(recipe, KVpopRecipe):
        scorers = _scorer_parameters(recipe, config)
        trainable, parameters = trainable * recipe.train_base + scorers, parameters + scorers
    stored = itemsize if launch.zero_stage or adapters else 4  # as in trainer/train.py
    state = training_state(parameters, trainable, itemsize=stored, adapters=adapters, launch=launch)
    notes = {"weights": _dtype_note(recipe, stored), "optimizer": "AdamW" + (", offloaded" if launch.offload else "")}
    items = [Item(name, device, host, note=notes.get(name, "")) for name, (device, host) in state.items()]
    if stored > itemsize:
        items.append(
            Item("weights under autocast", parameters * itemsize, when="update", note=f"their {recipe.dtype} copies")
        )
    size, checkpointing = recipe.per_device_train_batch_size, recipe.gradient_checkpointing
    prompt = 0
    if isinstance(recipe, SFTRecipe | KVpopRecipe):
        length, logits = recipe.max_length or ASSUMED_SFT_LENGTH, isinstance(recipe, SFTRecipe)
    else:
        prompt = _prompt_tokens(recipe.data)
        length, logits = prompt + recipe.max_completion_length, False
    note = f"estimate, {size} x {length} tokens, {'with' if checkpointing else 'without'} checkpointing"
    held = activation_bytes(config, size * length, itemsize, checkpointing, logits)
    items.append(Item("activations", held, when="update", note=note))
    if isinstance(recipe, SFTRecipe):
        return Plan(parameters, items)

    from sparse_rl.attention.families import cache_shape

    layers, kv_heads, _ = cache_shape(config)
    per_rank = size * recipe.gradient_accumulation_steps
    whole = launch.zero_stage < 3
    if isinstance(recipe, TaughtRecipe) and recipe.teacher_cache is None:
        taught = parameters if recipe.teacher is None else count_parameters(meta_model(load_config(recipe.teacher)))
        held = taught * itemsize // (1 if whole else launch.processes)
        items.append(Item("teacher", held, note=recipe.dtype + ("" if whole else ", in shards")))
    if isinstance(recipe, KVpopRecipe):
        items.append(_mask_item(recipe, layers, kv_heads, length, cuda))
        from sparse_rl.attention.future import CHUNK

        target = 3 * 4 * size * config.num_attention_heads * min(CHUNK, length) * length
        items.append(Item("future attention", target, when="update", note=f"of one layer, {CHUNK} keys at once"))
        return Plan(parameters, items)
    if isinstance(recipe, DistillRecipe):
        own = recipe.teacher is None and recipe.teacher_cache is None
        shared = own and whole and not recipe.refresh_every
        if not engine and recipe.completions != "student" and not shared:
            items.append(Item("simulating model", parameters * itemsize, note=recipe.dtype))
    elif isinstance(recipe, GRPORecipe):
        per_rank = size * (recipe.steps_per_generation or recipe.gradient_accumulation_steps)
        if recipe.beta and not adapters:
            items.append(Item("reference model", parameters * itemsize, note="beta > 0"))
    if launch.zero_stage == 3 and not engine:
        items.append(
            Item("gathered weights", parameters * itemsize, when="sampling", note="ZeRO-3 samples from whole weights")
        )
    at_once = min(recipe.rollout.max_batch, per_rank)
    items += engine
    items += _cache_items(recipe, config, recipe.cache, prompt, at_once, itemsize, bool(engine))
    if recipe.cache.get("policy") != "full" and getattr(recipe, "train_attention", "replay") == "replay":
        traces = trace_bytes(layers, kv_heads, length, per_rank)
        items.append(Item("traces", host=traces, note=f"{per_rank} sequences of {length} tokens"))
        items.append(_mask_item(recipe, layers, kv_heads, length, cuda))
        dense = mask_bytes(per_rank, kv_heads, length, layers)
        items.append(
            Item("dense masks instead", host=dense, when="avoided", note="what the traces replace; not allocated")
        )
    return Plan(parameters, items)


def _mask_item(recipe: ReplayedRecipe, layers: int, kv_heads: int, length: int, cuda: bool) -> Item:
    """What replay attention holds besides q, k and v; a GPU's `auto` is taken to find FlexAttention exact."""
    size = recipe.per_device_train_batch_size
    if recipe.attention_kernel.startswith("flex") or (recipe.attention_kernel == "auto" and cuda):
        held = 1 if recipe.gradient_checkpointing else layers
        note = "FlexAttention, " + ("one layer at a time" if held == 1 else "of every layer: no checkpointing")
        return Item("tiles", held * tiles_bytes(size, kv_heads, length), when="update", note=note)
    wide = 8 if recipe.attention_kernel == "dense" else attention_itemsize(recipe.dtype, cuda)
    note = f"replay attention, one layer at a time: 1 byte, and {wide} as SDPA converts it"
    return Item("mask of one layer", sdpa_mask_bytes(size, kv_heads, length, wide), when="update", note=note)


def _scorer_parameters(recipe: KVpopRecipe, config: Any) -> int:
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.policies import make_policy
    from sparse_rl.scorers import sketch_scorer

    policy: Any = make_policy(recipe.cache)
    layers, heads, dim = cache_shape(config)
    scorer = sketch_scorer(policy.config.scorer, heads=heads, dim=dim)
    return layers * sum(weight.numel() for weight in scorer.parameters())


def _engine_items(recipe: SampledRecipe | EvalRecipe, config: Any, weights: int, cuda: bool) -> list[Item]:
    """What vllm holds: its own weights, and a pool for keys and values. Nothing for hf, which has neither."""
    from rollout.choice import choose_engine

    rollout = recipe.rollout
    if choose_engine(rollout, config, cuda)[0] == "hf":
        return []
    own = -(-weights // rollout.tensor_parallel)
    when, note = "sampling" if rollout.sleep else "always", f"{recipe.dtype}, its own copy"
    if rollout.kv_cache_gb is not None or not cuda:
        size = rollout.kv_cache_gb or 1  # as the engine has it
        pool, source = int(size * 2**30), f"kv_cache_gb {size:g}"
    else:
        share = rollout.gpu_memory_utilization * (device_memory() or 0)
        pool, source = max(int(share) - own, 0), f"gpu_memory_utilization {rollout.gpu_memory_utilization:g}"
    return [Item("vllm: weights", own, when=when, note=note), Item("vllm: KV pool", pool, when=when, note=source)]


def _cache_items(
    recipe: Any, config: Any, block: Any, prompt: int, at_once: int, itemsize: int, pooled: bool
) -> list[Item]:
    """The cache of one point; `pooled`: it is part of the engine's pool, and only shown."""
    from sparse_rl.attention.families import cache_shape
    from sparse_rl.models.directory import saved_policy
    from sparse_rl.policies import make_policy

    policy = make_policy(block) if block is not None else saved_policy(recipe.model) or make_policy("full")
    shape, total = cache_shape(config), prompt + recipe.max_completion_length
    fed = max(total - 1, prompt)  # the last token is not
    entries = policy.schedule.most_held(prompt, fed)
    one, full = cache_bytes(entries, *shape, itemsize), cache_bytes(total - 1, *shape, itemsize)
    state = state_bytes(policy, entries, *shape[:2])
    name = " ".join(map(str, filter(None, (policy.name, policy.parameters().get("budget")))))
    note = f"{name}: {entries} entries, {show(one)} a sequence; full {show(full)}"
    when = "avoided" if pooled else "sampling"
    items = [Item(f"KV cache of {at_once}", at_once * (one + state), when=when, note=note)]
    if policy.schedule.first(prompt) <= fed and (transient := redundancy_bytes(policy, entries, shape[1])):
        note = f"{name}: similarities of {entries} x {entries} entries, one sequence of one layer at a time"
        items.append(Item("redundancy", transient, when="sampling", note=note))
    return items


def _dtype_note(recipe: Any, stored: int) -> str:
    kept = "float32" if stored == 4 else recipe.dtype
    return kept + (f", ZeRO-{recipe.launch.zero_stage}" if recipe.launch.zero_stage else "")


def _prompt_tokens(data: DataConfig) -> int:
    if data.synthetic is not None:
        return 2 * data.synthetic.n + 2
    return data.max_prompt_tokens or ASSUMED_PROMPT


def _problems(recipe: EvalRecipe) -> int:
    known = [d.synthetic.size if d.synthetic else d.limit for d in recipe.tasks.values()]
    return max(n or recipe.rollout.max_batch for n in known)


# ---- this machine --------------------------------------------------------------------------------------------------


def host_memory() -> int:
    """Bytes of host memory, the limit of the control group included."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def device_memory() -> int | None:
    """Bytes of the first GPU; None without one."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def show(size: float) -> str:
    """Bytes as a person reads them (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


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
