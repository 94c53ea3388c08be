"""Predict the memory of a run, in bytes, from the recipe and the model's configuration, without loading anything.

`sparse-rl doctor RECIPE` prints the plan. Our components compute their own bytes; this module adds
those of the losses, DeepSpeed and CUDA, and sums up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.filesize import decimal

from rollout.context.cache import context_bytes
from rollout.context.compact import stored_queries
from rollout.measure.accuracy import label as policy_label
from rollout.measure.contexts import label
from rollout.turns import turn_lengths
from rollout.vllm.memory import beside_cache, held_head, kept_bytes, pool_bytes
from sparse_rl.attention.families import windows_of
from sparse_rl.attention.views import KEPT
from sparse_rl.data.config import DataConfig
from sparse_rl.data.synthetic import Retrieval
from sparse_rl.experts import routed_experts
from sparse_rl.kernels.flex import padded, tiles_bytes
from sparse_rl.kernels.future import future_bytes
from sparse_rl.methods.kvpop.scorers import sketch_scorer
from sparse_rl.methods.pages.layered import Layered
from sparse_rl.methods.pages.policy import Clustered
from sparse_rl.models.load import load_shape
from sparse_rl.models.weights import meta_model
from sparse_rl.policies.base import Policy
from sparse_rl.policies.cache import ITEMSIZE, cache_bytes, query_bytes, state_bytes, window_bytes
from sparse_rl.policies.schedule import GrowingSchedule
from sparse_rl.recipe import DistillRecipe, GRPORecipe, KVpopRecipe, Run, TaughtRecipe, TrainRecipe
from sparse_rl.states.mixers import sequence_numbers
from sparse_rl.trace.record import trace_bytes
from trainer.config import LaunchConfig
from trainer.memory import activation_bytes, count_parameters, lora_parameters, loss_bytes, training_state

ASSUMED_PROMPT = 512  # tokens in a prompt, if the recipe does not bound its prompts
QUERY = 12  # bytes of the record of one reference query
SUPPORT = 60  # bytes of a typical support, of 15 tokens; top-p and min-p do not bound it
ASSUMED_LENGTH = 4096  # tokens in a row, if the recipe does not bound its rows
TWICE = "each before and after a turn"
TIGHT = 0.9  # share of the memory above which a fit is called tight
OUTSIDE = 1_500_000_000  # bytes of a GPU outside PyTorch: 0.4 GB for CUDA, 0.7 for NCCL (its issue 964), 0.4 for graphs
TILE = 4096, 32_768  # tokens and vocabulary of the logits that TRL's fused head holds
BUCKET, LIVE = 500_000_000, 1_000_000_000  # DeepSpeed's reduce_bucket_size (held twice) and stage3_max_live_parameters


def host_memory() -> int:
    """Return the bytes of host memory, or the limit of the control group if the limit is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(text)) if text.isdigit() else physical


def device_memory() -> int | None:
    """Return the bytes of memory of the first GPU; None if there is no GPU."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Item:
    """Bytes that one process holds on its device and in host memory.

    name, note : label and remark of the item in the memory table
    when : phase in which the bytes are held: always, sampling, update, or a part of the update: forward, loss, backward
    """

    name: str
    device: int = 0
    host: int = 0
    when: str = "always"
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Memory plan of one process, for a model with `parameters` parameters."""

    parameters: int
    items: list[Item] = field(default_factory=list)

    @property
    def device(self) -> int:
        """Peak bytes on the device: permanent items plus the larger of sampling and update, with its largest part."""
        phases = ("sampling",), *(("update", part) for part in ("forward", "loss", "backward"))
        held = [sum(item.device for item in self.items if item.when in phase) for phase in (("always",), *phases)]
        return held[0] + max(held[1:])

    @property
    def host(self) -> int:
        return sum(item.host for item in self.items)


def verdict(need: int, have: int, where: str) -> str:
    """Return one line that says whether `need` bytes fit into the `have` bytes of the memory `where`."""
    word = "does not fit" if need > have else "tight" if need > TIGHT * have else "fits"
    return f"{where}: {word}, about {decimal(need)} of {decimal(have)}"


def verdicts(made: Plan, launch: LaunchConfig, device: int | None, host: int | None) -> list[str]:
    """Return a line that says whether a plan fits into device memory, and a line for host memory, unless it is None.

    Without a GPU (`device` None), only host memory counts, which all processes of a machine share.
    """
    local = launch.processes // launch.machines
    if device is None:
        where = f"host memory ({local} process{'es' * (local > 1)}, no GPU)"
        return [verdict(local * (made.device + made.host), host or 0, where)]
    lines = [verdict(made.device, device, "GPU memory, per process")]
    return lines if host is None else [*lines, verdict(local * made.host, host, "host memory")]


def plan(run: Run, device: int | None) -> Plan:
    """Return the memory plan of a resolved recipe on a GPU with `device` bytes, or on a CPU if `device` is None."""
    made = (_Training if isinstance(run.recipe, TrainRecipe) else _Evaluation)(run, device).plan()
    if device is not None:
        made.items.append(Item("outside PyTorch", OUTSIDE, note="an allowance for CUDA, NCCL and graphs"))
    return made


class _Process:
    """Memory of one process: its model, its engine, and the engine's caches."""

    def __init__(self, run: Run, device: int | None) -> None:
        self.recipe, self.config, self.shape = run.recipe, run.config, run.shape
        self.policies, self.total, self.cuda = run.policies, device or 0, device is not None
        self.windows = list(filter(None, windows_of(self.config)))  # of the layers that have one, in tokens
        self.heads, self.itemsize = self.config.num_attention_heads, ITEMSIZE[self.recipe.dtype]
        self.skeleton = meta_model(self.config)
        self.states = sequence_numbers(self.skeleton)
        self.parameters = count_parameters(self.skeleton)
        self.weights = self.parameters * self.itemsize
        rollout = self.recipe.rollout
        in_float32 = self.recipe.dtype == "float32" and not self.cuda
        self.exact = in_float32 and (rollout is None or rollout.exact)  # attention is computed in float64
        self.vllm = rollout is not None and rollout.engine == "vllm"
        self.server = rollout is not None and rollout.engine == "server"
        self.turns = bool(getattr(self.recipe, "tools", None) or getattr(self.recipe, "environment", None))
        self.schemas = self.recipe.schema_tokens(run.tokenizer) if self.turns and run.tokenizer is not None else 0
        self.keeps = self.turns and self.policies[0].config.turns == "kept"

    def engine_items(self) -> list[Item]:
        """Return the items of the vllm engine, such as its copy of the weights and its KV pool. Empty for hf."""
        recipe, rollout = self.recipe, self.recipe.rollout
        if self.server:
            note = "a copy that the servers are given, in one process of each machine"
            return [Item("weights for servers", host=self.weights * isinstance(recipe, TrainRecipe), note=note)]
        if not self.vllm:
            return []
        own = -(-self.weights // rollout.tensor_parallel)
        when, note = "sampling" if rollout.sleep else "always", f"{recipe.dtype}, its own copy"
        kept = own if rollout.sleep and recipe.kind == "distill" else 0  # grpo replaces the weights after each sleep
        size: dict[str, Any] = {"itemsize": self.itemsize, "tensor_parallel": rollout.tensor_parallel}
        buffers = (beside_cache(policy, self.config, max_batch=rollout.max_batch, **size) for policy in self.policies)
        beside = max(buffers, key=lambda beside: beside.requests)
        if rollout.kv_cache_gb is not None or not self.cuda:
            gib = rollout.kv_cache_gb or 1  # the engine's default
            pool, source = int(gib * 2**30), f"kv_cache_gb {gib:g}"
        else:
            source = f"gpu_memory_utilization {rollout.gpu_memory_utilization:g}"
            share = int(beside.share(rollout.gpu_memory_utilization, self.total) * self.total)
            pool = max(share - own - OUTSIDE, 0)  # vLLM subtracts both
            source += "" if pool else " leaves no room for a cache, so vLLM will not start"
        arguments = recipe.engine_arguments()
        if self.turns and (longest := recipe.longest_prompt()) is not None:
            lengths = turn_lengths(self.policies[0], longest + self.schemas, recipe.sampling().max_tokens)
            arguments = rollout.arguments(recipe.dtype, *lengths)
        need = max(pool_bytes(policy, arguments, self.config, self.cuda) for policy in self.policies)
        if need < pool:
            shared = " and a shared prompt" * any(policy.schedule.evicts for policy in self.policies)
            most = f"the most that {rollout.max_batch} sequences{shared} can fill"
            pool, source = need, f"{most}; {source} would be {decimal(pool)}"
        held = int(pool * beside.per_byte) + beside.requests
        asleep = held if rollout.sleep else 0
        conversations, count = list[Item](), recipe.sequences() or 0
        if self.keeps:
            host = kept_bytes(self.policies[0], self.config, count, itemsize=self.itemsize, cuda=self.cuda)
            conversations = [Item("vllm: kept conversations", host=host, when="sampling", note=f"{count}, {TWICE}")]
        return [
            Item("vllm: weights", own, kept, when=when, note=note),
            Item("vllm: KV pool", pool, when=when, note=source),
            Item("vllm: beside the pool", held, asleep, when, "positions, the policy's state and last queries"),
            Item("vllm: sampler", beside.sampler, when="sampling", note=f"{rollout.max_batch} tokens, with top_p"),
            *conversations,
        ]

    def cache_items(self, policy: Policy, prompt: int, at_once: int, some: int | None = None) -> list[Item]:
        """Return the items of the cache of `at_once` sequences, without the layers that have a sliding window.

        some : number of layers that `policy` covers, if it is a part of a layered policy
        """
        layers, kv_heads, head_dim = self.shape
        if isinstance(policy, Layered):
            parts = zip(policy.parts, policy.config.spans(layers), strict=True)
            return [item for part, n in parts if n for item in self.cache_items(part, prompt, at_once, n)]
        layers, fed = some or layers, self.fed(prompt)
        read = turn_lengths(policy, prompt, fed + 1 - prompt)[0] if self.turns else prompt
        entries = policy.schedule.most_held(read, fed)
        wide = held_head(policy, head_dim, self.exact, self.cuda) if self.vllm else head_dim
        summaries = entries // policy.config.page if isinstance(policy, Clustered) else 0
        unit_bytes = cache_bytes(entries + summaries, layers, kv_heads, wide, self.itemsize)
        state = state_bytes(policy, entries, layers, kv_heads, head_dim)
        state += query_bytes(policy, layers, self.heads, head_dim, self.itemsize)
        name = policy_label(policy) + (f" in {some} layers" if some else "")
        note = f"{name}: {entries} entries, {decimal(unit_bytes)} per sequence"
        if isinstance(policy.schedule, GrowingSchedule) and fed > prompt:
            queries = torch.arange(prompt + 1, fed + 1)
            attended = policy.schedule.attended(queries * 0 + prompt, queries).double().mean()
            note += f" ({attended:.0f} entries on average while it decodes)"
        note += f"; heads of {wide}, which include biases" if wide > head_dim else ""
        if self.vllm:  # the pool contains them
            return [Item(f"KV cache of {at_once}", when="sampling", note=f"{note}, in the pool")]
        items = [Item(f"KV cache of {at_once}", at_once * (unit_bytes + state), when="sampling", note=note)]
        if self.keeps:
            between = min(policy.schedule.peak or fed, fed) if policy.schedule.evicts else fed
            share = (unit_bytes + state) * between // entries
            share += window_bytes(self.config, fed, self.itemsize) if self.windows and some is None else 0
            count = self.recipe.sequences() or at_once
            items.append(Item("kept conversations", 2 * count * share, when="sampling", note=f"{count}, {TWICE}"))
        return items

    def fed(self, prompt: int) -> int:
        """Return the maximum number of tokens that a cache holds after prompts of `prompt` tokens."""
        return max(prompt + self.recipe.sampling().max_tokens - 1, prompt)  # the last token is never fed

    def window_items(self, tokens: int, at_once: int | None = None) -> Iterator[Item]:
        """Yield the item of the layers with a sliding window, if any, of `at_once` sequences or of one context."""
        if self.windows:
            unit_bytes, entries = window_bytes(self.config, tokens, self.itemsize), min(max(self.windows), tokens)
            note = f"{len(self.windows)} layers with a window of {max(self.windows)} tokens: {entries} entries"
            note += f", {decimal(unit_bytes)} per sequence, under any policy"
            name = "the context" if at_once is None else str(at_once)
            yield Item(f"sliding windows of {name}", (at_once or 1) * unit_bytes, when="sampling", note=note)

    def state_items(self, at_once: int) -> Iterator[Item]:
        if any(self.states):
            recurrent, inputs = self.states
            recurrent_bytes = recurrent * (8 if self.exact else 4)
            unit_bytes = recurrent_bytes + inputs * self.itemsize
            entries = unit_bytes // cache_bytes(1, *self.shape, self.itemsize)
            note = f"{decimal(unit_bytes)} per sequence ({decimal(recurrent_bytes)} recurrent), as much as {entries:,}"
            note += " entries of the cache: under a smaller budget, most of the memory of sampling"
            yield Item(f"states of {at_once}", at_once * unit_bytes, when="sampling", note=note)

    def context_items(self, tokens: int, at_once: int) -> list[Item]:
        """Return the items of contexts of `tokens` tokens, compacted one after another, and of `at_once` questions."""
        shape, configs, group = self.shape, self.recipe.prompt_caches(), self.heads // self.shape[1]
        unit_bytes = cache_bytes(1, *shape, self.itemsize) // 2  # bytes of one query in all layers and kv heads
        stored = max(stored_queries(config, tokens, group) for config in configs)
        counts = {label(config): config.first + config.last + config.kept(tokens) for config in configs}
        most, own = max(counts.values()), ASSUMED_PROMPT + self.recipe.sampling().max_tokens
        sizes = (f"{name} {decimal(context_bytes(count, *shape, self.itemsize))}" for name, count in counts.items())
        answers = at_once * cache_bytes(own, *shape, self.itemsize)
        answers += at_once * cache_bytes(most + own, 1, *shape[1:], self.itemsize)
        answers += at_once * window_bytes(self.config, tokens + own, self.itemsize)  # a row has its own last tokens
        whole, compacted = (context_bytes(count, *shape, self.itemsize) for count in (tokens, most))
        note = f"questions of {ASSUMED_PROMPT} tokens, answers, and a copy of one layer joined to the context"
        note += ", and sliding windows" if self.windows else ""
        return [
            Item("context", whole, when="sampling", note=f"{tokens} tokens, before compaction"),
            Item("reference queries", stored * unit_bytes, when="sampling", note=f"{stored} per kv head"),
            Item("compacted context", compacted, when="sampling", note=", ".join(sizes)),
            *self.window_items(tokens),
            Item(f"KV cache of {at_once}", answers, when="sampling", note=note),
        ]


class _Evaluation(_Process):
    """Memory of an evaluation, or of another recipe that samples without training."""

    def plan(self) -> Plan:
        """Return the memory plan. The caches of a sweep are used in turn: only the largest counts."""
        recipe: Any = self.recipe  # every kind that samples without training has `sequences`
        engine = self.engine_items()
        if self.server:
            return Plan(self.parameters, engine)
        weights = [Item("weights", self.weights, note=recipe.dtype)]
        prompts = [prompt_tokens(data) for data in recipe.prompt_sources().values()] or recipe.prompt_bounds()
        prompt = max(tokens or ASSUMED_PROMPT for tokens in prompts) + self.schemas
        at_once = min(recipe.rollout.max_batch, recipe.sequences() or recipe.rollout.max_batch)
        if recipe.prompt_caches():
            return Plan(self.parameters, weights + self.context_items(prompt, at_once))
        points = [self.cache_items(policy, prompt, at_once) for policy in self.policies]
        items = (engine or weights) + max(points, key=lambda point: sum(item.device for item in point))
        items += [*self.window_items(self.fed(prompt), at_once), *self.state_items(at_once)]
        return Plan(self.parameters, items)


class _Training(_Process):
    """Memory of a training run, and of the engine that the run samples from."""

    def plan(self) -> Plan:
        recipe: Any = self.recipe
        engine = self.engine_items()
        launch, adapters = recipe.launch, recipe.lora is not None
        self.prompt = prompt_tokens(recipe.data) + self.schemas
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
        zero = f", ZeRO-{launch.zero_stage}" if launch.zero_stage else ""
        notes = {"weights": f"{dtype}{zero}", "optimizer": "AdamW, offloaded" if launch.offload else "AdamW"}
        items = [Item(name, device, host, note=notes.get(name, "")) for name, (device, host) in state.items()]
        items += self.update_items(stored, trained=trainable >= self.parameters)
        if isinstance(recipe, TaughtRecipe) and recipe.taught_by.teacher_cache is None and not recipe.without_teacher:
            items.append(self.teacher(recipe, copy))
        if recipe.foresees():
            rows = recipe.training.per_device_train_batch_size
            size = future_bytes(rows, self.heads, self.shape[2], self.length, self.itemsize, self.cuda)
            items.append(Item("future attention", size, when="update", note="the scorers' target, of one layer"))
        if isinstance(recipe, GRPORecipe) and recipe.grpo.beta and not adapters:
            items.append(Item("reference model", copy, note="beta > 0"))
        if isinstance(recipe, DistillRecipe) and not engine and recipe.simulates_apart:
            items.append(Item("simulating model", copy, note=recipe.dtype))
        if recipe.rollout is not None:
            items += self.sampling_items(engine)
        if recipe.rollout is not None or recipe.data.traces:
            items += self.trace_items()
        return Plan(parameters, items)

    def update_items(self, stored: int, trained: bool) -> Iterator[Item]:
        """Yield the items of an update. Weights have `stored` bytes each, and the head is `trained` or not."""
        recipe: Any = self.recipe
        training, launch, vocabulary = recipe.training, recipe.launch, self.config.vocab_size
        rows, checkpointing = training.per_device_train_batch_size, training.gradient_checkpointing
        tokens = rows * self.length
        kept, again = activation_bytes(self.skeleton, tokens, self.itemsize, stored, checkpointing)
        if isinstance(recipe, TaughtRecipe):  # bytes of a logit: measured
            per_logit = 45 if recipe.loss.divergence == "jsd" and recipe.loss.top_k is None else 28
            logits = min(tokens, recipe.loss.chunk) * vocabulary * per_logit
        else:
            logits = min(tokens, TILE[0]) * min(vocabulary, TILE[1]) * self.itemsize
        note = f"estimate, {rows} x {self.length} tokens, {'with' if checkpointing else 'without'} checkpointing"
        yield Item("activations", kept, when="update", note=note)
        if stored > self.itemsize:  # with checkpointing, the backward pass copies one layer's weights at a time
            when, note = "forward" if checkpointing else "update", f"their {recipe.dtype} copies"
            yield Item("weights under autocast", self.parameters * self.itemsize, when=when, note=note)
        yield Item("head and loss", loss_bytes(self.config, tokens, logits, trained), when="loss")
        yield Item("a layer's activations", again, when="backward", note="with its gradients")
        if launch.zero_stage:
            size = 4 if launch.gradient_dtype == "float32" else self.itemsize
            yield Item("DeepSpeed: bucket", 2 * size * min(BUCKET, self.parameters), when="backward")
        if launch.zero_stage == 3:
            ends = (2 - self.config.tie_word_embeddings) * vocabulary * self.config.hidden_size  # embedding and head
            yield Item("DeepSpeed: gathered", self.itemsize * min(self.parameters, LIVE + ends), when="update")

    def teacher(self, recipe: TaughtRecipe, copy: int) -> Item:
        """Return the item of a teacher held in memory. By default it is a copy of the student, of `copy` bytes."""
        whole, held = recipe.launch.zero_stage < 3, copy
        if recipe.taught_by.teacher is not None:
            held = count_parameters(meta_model(load_shape(recipe.teacher_model))) * self.itemsize
        held //= 1 if whole else recipe.launch.processes
        return Item("teacher", held, note=recipe.dtype + ("" if whole else ", in shards"))

    def sampling_items(self, engine: list[Item]) -> list[Item]:
        recipe, items, (policy,) = self.recipe, list(engine), self.policies
        if self.server:
            return items
        if recipe.launch.zero_stage == 3 and not engine:
            note = "ZeRO-3 gathers the weights for sampling"
            items.append(Item("gathered weights", self.weights, when="sampling", note=note))
        at_once = min(recipe.rollout.max_batch, recipe.sequences())
        if recipe.prompt_caches():
            return [*items, *self.context_items(self.prompt, at_once)]
        return [
            *items,
            *self.cache_items(policy, self.prompt, at_once),
            *self.window_items(self.fed(self.prompt), at_once),
            *self.state_items(at_once),
        ]

    def trace_items(self) -> list[Item]:
        recipe, items, sequences = self.recipe, list[Item](), self.recipe.sequences()
        (policy,), (layers, kv_heads, _), contexts = self.policies, self.shape, self.recipe.prompt_caches()
        if (policy.schedule.evicts or contexts) and not (
            isinstance(recipe, GRPORecipe) and recipe.grpo.train_attention == "full"
        ):
            experts = routed_experts(self.skeleton)
            traces = trace_bytes(layers, kv_heads, self.length, sequences, policy.config.recorded, experts)
            traces += trace_bytes(len(self.windows), kv_heads, self.length, sequences)
            traces += sum(QUERY * sequences * self.prompt * config.fits for config in contexts)
            note = f"{sequences} sequences of {self.length} tokens" + (f", {experts} experts each" if experts else "")
            items.append(Item("traces", host=traces, note=note))
            items += self.tile_items(recipe.training.per_device_train_batch_size) if self.cuda else ()
        if (sampling := recipe.sampling()).truncated_support:
            most = -(-self.config.vocab_size // 32)  # words of the largest record of a draw
            size = 4 + (SUPPORT if sampling.top_k is None else 4 * min(sampling.top_k, most))
            note = f"{size} bytes a token, " + ("a typical size" if sampling.top_k is None else "the most with top_k")
            items.append(Item("supports", host=sequences * self.length * size, note=note))
        return items

    def tile_items(self, rows: int) -> Iterator[Item]:
        """Yield the items of FlexAttention (kernels/flex.py) under the traces of `rows` rows."""
        layers, kv_heads, dim = self.shape
        width = padded(self.length)
        tiles = tiles_bytes(rows * kv_heads, width)  # of a layer
        at_once = min(layers, max(1, KEPT // tiles)) if self.recipe.training.gradient_checkpointing else layers
        yield Item("tiles", at_once * tiles, when="update", note=f"of {at_once} layers")
        heads = 2 * rows * self.heads * width * dim * self.itemsize
        yield Item("gradients of keys", heads, when="backward", note="and values, of one layer, for each query head")


def prompt_tokens(data: DataConfig) -> int:
    """Return the number of tokens of the longest prompt, or ASSUMED_PROMPT if prompts are not bounded."""
    if (task := data.synthetic) is not None and task.task == "retrieval":
        return Retrieval(task.facts, task.restated, task.filler).document_tokens + 2
    if task is not None:
        return 2 * task.n + 2
    return data.max_prompt_tokens or ASSUMED_PROMPT
