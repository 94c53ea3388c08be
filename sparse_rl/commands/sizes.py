"""Bytes that a run takes, as pure functions of shapes and policies. memory.py says which of them a recipe needs.

Caches, traces, masks, weights and the optimizer's state are counted exactly; activations are an estimate. Legend: B
sequences, S tokens, L layers, Hkv kv heads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rollout.vllm.folded import wide_head
from sparse_rl.attention.families import cache_shape
from sparse_rl.policies.config import GKVConfig, PolicyConfig, RKVConfig
from trainer.config import LaunchConfig, LoraConfig

if TYPE_CHECKING:
    from rollout.context import PromptCacheConfig
    from sparse_rl.policies.base import Policy
    from sparse_rl.policies.config import ClusteredConfig
    from sparse_rl.recipe import Recipe

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK = {"cuda": 16, "cpu": 32}  # tokens, of vllm's cache


# ---- caches, traces, masks -----------------------------------------------------------------------------------------


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one sequence that holds `entries` per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


def held_head(policy: Policy, head_dim: int, exact: bool, cuda: bool) -> int:
    """The head size of vllm's cache: wider than the model's where a bias is stored in the heads (folded.py).

    exact : see `computes_exactly`
    """
    if policy.bias is None or exact:
        return head_dim
    return wide_head(head_dim, on_cpu=not cuda)


def pool_bytes(policy: Policy, given: dict[str, Any], config: Any, cuda: bool) -> int:
    """The cache of one worker of vllm that all sequences can fill, each at its longest; one block is vLLM's own.

    given : what `make_engine` is given; config : the model's
    """
    layers, kv_heads, head_dim = cache_shape(config)
    longest = given["max_model_len"] or config.max_position_embeddings
    block = BLOCK["cuda" if cuda else "cpu"]
    blocks = -(-policy.schedule.most_held(given["max_prompt"] or longest, longest) // block)
    exact = given["exact"] and given["dtype"] == "float32" and not cuda
    head, entries = held_head(policy, head_dim, exact, cuda), (given["max_batch"] * blocks + 1) * block
    return cache_bytes(entries, layers, kv_heads // given["tensor_parallel"], head, ITEMSIZE[given["dtype"]])


def state_bytes(policy: Policy, entries: int, layers: int, kv_heads: int, head_dim: int) -> int:
    """What a policy and its cache remember of one sequence beside keys and values.

    Of each entry an int64 position and float32 scores, and what the policy remembers of the sequence itself.
    """
    own = sum(value.nbytes for value in policy.sequence_memory(kv_heads, head_dim).values())
    return layers * (kv_heads * entries * (8 + 4 * len(policy.entry_memory)) + own)


def query_bytes(policy: Policy, layers: int, heads: int, head_dim: int, itemsize: int) -> int:
    """The last queries of one sequence, of all `heads` query heads, that a policy scores or fits by."""
    return layers * policy.last_queries * heads * head_dim * itemsize


def fit_bytes(rows: int, kv_heads: int, queries: int, entries: int, kept: int, head_dim: int) -> int:
    """The transient of Attention Matching's fits: of `rows` rows that are fitted at once, in one layer.

    queries : reference queries of a kv head; entries : that a block has; kept : that are fitted

    In float64 five arrays like the logits, three of kept x kept, and the block's keys, values and queries.
    """
    return 8 * rows * kv_heads * (5 * queries * entries + 3 * kept**2 + head_dim * (4 * entries + 2 * queries))


def folded_rows(entries: int, requests: int, shape: tuple[int, int, int], device: str) -> int:
    """How many (request, layer) pairs vllm compacts in one call, of requests that are due together.

    entries : that each holds in a kv head; shape : (layers, kv heads, head dim)
    """
    from rollout.vllm.state import AT_ONCE, MOST

    layers, kv_heads, head_dim = shape
    one = entries * kv_heads * head_dim
    requests = min(requests, max(1, MOST // one))
    return requests * min(layers, max(1, AT_ONCE[device] // (requests * one)))


def folded_bytes(
    policy: Policy, rows: int, entries: int, kv_heads: int, head_dim: int, group: int, dtype: str, device: str
) -> int:
    """The transient of vllm's compaction of `folded_rows`, or of H2O's observation, beside redundancy and fits.

    group : query heads of a kv head; dtype : of the cache

    What a policy declares that it reads, of keys and values, is copied once more as it becomes one run of memory. Where
    queries score, keys are converted to float32, and logits of the window's queries stand beside their softmax. Where
    none do, the score is taken to make three arrays like the keys in float64. A fit has keys and values beside copies
    of them in order. A policy that declares nothing reads only the entries that move, and their places. And of each
    entry its position and a few more numbers.
    """
    itemsize = ITEMSIZE[dtype]
    keys, window = itemsize * head_dim, policy.last_queries or int(policy.every_query)
    reads = max(len(policy.score_reads), len(policy.observe_reads) if policy.every_query else 0)
    remembered = 8 + 4 * len(policy.entry_memory)
    if policy.bias is not None:
        queries, each = itemsize, 4 * keys + 32 + remembered
    elif window:
        queries, logits = 4 + itemsize, 4 * group * window
        converted = 4 * head_dim if itemsize < 4 else 0
        read = reads * keys
        each = max(read + keys, read + converted + logits, read + 2 * logits) + remembered
    elif reads:
        queries, each = 0, reads * keys + 24 * head_dim + remembered
    else:
        left = policy.schedule.budget
        moved = max(min(left, entries - left), 0) / entries
        queries, each = 0, int((keys + 48) * moved) + 24
    largest = rows * kv_heads * (entries * each + group * window * head_dim * queries)
    similar = redundancy_bytes(
        policy, entries, kv_heads, head_dim, rows, device, dtype
    )  # made while the keys are there
    return max(largest - similar, rows * kv_heads * entries * (keys + 16 + remembered)) if similar else largest


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
    from sparse_rl.policies.am import AM, rows_at_once

    rows = folded_rows(entries, requests, shape, device) if vllm else requests
    sizes, once = (entries, *shape[1:]), f"of {rows} " + ("(sequence, layer)" if vllm else "sequences of one layer")
    found = {"redundancy": (redundancy_bytes(policy, *sizes, rows, device, dtype), f"{once}, similarities in tiles")}
    if vllm:
        folded = folded_bytes(policy, rows, *sizes, group, dtype, device)
        found["compaction"] = folded, f"{once}, what is read and what scores it"
    if isinstance(policy, AM):
        queries = policy.config.conditions(group)
        fitted = min(rows, rows_at_once(shape[1] * queries * entries))
        fits = fit_bytes(fitted, shape[1], queries, entries, policy.config.refitted, shape[2])
        found["fits"] = fits, f"{once}, {fitted} at once, in float64"
    return found


def context_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """A context of so many entries per kv head: keys and values, and of each entry a float32 bias and its position."""
    return cache_bytes(entries, layers, kv_heads, head_dim, itemsize) + 12 * layers * kv_heads * entries


def reading_bytes(tokens: int, heads: int) -> int:
    """The masks of a piece of a context, as it is read once more behind itself."""
    from rollout.context.cache import MOST_LOGITS
    from rollout.hf import PIECE

    return 12 * min(MOST_LOGITS, heads * min(PIECE, tokens) * 2 * tokens)


def reference_queries(config: PromptCacheConfig, tokens: int, group: int) -> int:
    """The most reference queries of a kv head, before some are drawn, of a context of so many tokens."""
    from rollout.context.prompts import STUDY_PROMPTS

    study = len(STUDY_PROMPTS) * config.study_samples * config.study_tokens
    read = {"self_study": study, "window": min(config.window, tokens)}
    return group * sum(read.get(kind, tokens) for kind in config.queries) if config.chooses else 0


def compaction_bytes(config: PromptCacheConfig, tokens: int, group: int, kv_heads: int, head_dim: int) -> int:
    """The transient of a compaction: of the kv heads of a layer that are compacted at once, and of one part."""
    from rollout.context.compact import MOST_LOGITS

    if not config.chooses:
        return 0
    queries = min(reference_queries(config, tokens, group), config.most_queries)
    if config.policy == "evict":  # all heads and tokens, and some queries at a time
        some = min(queries, max(1, MOST_LOGITS // (kv_heads * tokens)))
        return fit_bytes(1, kv_heads, some, tokens, 0, head_dim)
    parts = -(-config.between(tokens) // config.chunk)
    part = tokens if parts == 1 else -(-config.between(tokens) // parts) + config.first + config.last
    heads = kv_heads if queries * kv_heads * min(tokens, config.chunk) <= MOST_LOGITS else 1
    fitted = -(-config.kept(tokens) // parts)
    pursued = fitted * max(queries, part) + part**2 if config.select == "omp" else 0  # what its steps read again
    return fit_bytes(1, heads, queries, part, fitted, head_dim) + 8 * heads * pursued


def trace_bytes(layers: int, kv_heads: int, length: int, sequences: int = 1, each: int = 4) -> int:
    """Recorded decisions, `each` bytes per layer, kv head and token, in host memory; an eviction is one int32."""
    return each * layers * kv_heads * length * sequences


def pages_bytes(rows: int, heads: int, kv_heads: int, head_dim: int, length: int, cache: ClusteredConfig) -> int:
    """What the replay of clustered attention gathers for a chunk of queries of one layer, in numbers of the attention's
    dtype: keys, values and logits of what it reads, and the same again for the backward pass.
    """
    from sparse_rl.attention.views.paged import CHUNK

    assert cache.open_pages is not None
    opened, summaries = cache.open_pages * cache.page, length // cache.page
    raw = cache.sinks + min(cache.window + cache.page + CHUNK, length)
    read = 2 * head_dim * (CHUNK * opened + raw + summaries)
    logits = heads // kv_heads * CHUNK * (opened + raw + summaries)
    return 2 * rows * kv_heads * (read + 2 * logits)


def future_bytes(sequences: int, heads: int, head_dim: int, length: int, itemsize: int, cuda: bool) -> int:
    """One layer's target of KVpop's scorers: three float32 arrays of some keys over all queries; on a GPU, which is
    taken to find FlexAttention exact, queries and keys once more for each query head.
    """
    from sparse_rl.attention.future import CHUNK
    from sparse_rl.attention.kernels.flex import padded

    if cuda:
        return 2 * itemsize * sequences * heads * padded(length) * head_dim
    return 3 * 4 * sequences * heads * min(CHUNK, length) * length


def gates_bytes(sequences: int, heads: int, kv_heads: int, length: int, itemsize: int) -> int:
    """What DMS's soft gates hold of one layer's chunk of queries: a bias in float32 and in the attention's dtype, and
    three arrays of logits for the backward pass.
    """
    from sparse_rl.attention.views.gated import CHUNK

    pairs = sequences * min(CHUNK, length) * length
    return pairs * (kv_heads * (4 + itemsize) + 3 * heads * itemsize)


def mask_bytes(sequences: int, kv_heads: int, length: int, layers: int = 1) -> int:
    """Boolean masks [B, Hkv, S, S]: of one layer, as replay attention makes them, or of all, as dense traces would."""
    return sequences * layers * kv_heads * length * length


def computes_exactly(recipe: Recipe, cuda: bool) -> bool:
    """Whether float32 attention is computed in float64, as it is on a CPU where a recipe says nothing else."""
    rollout = recipe.rollout
    return recipe.dtype == "float32" and not cuda and (rollout is None or rollout.exact)


def attention_itemsize(recipe: Recipe, cuda: bool) -> int:
    """Bytes of a number in the attention: the dtype's, or float64's."""
    return 8 if computes_exactly(recipe, cuda) else ITEMSIZE[recipe.dtype]


def sdpa_mask_bytes(sequences: int, kv_heads: int, length: int, itemsize: int) -> int:
    """One layer's mask in replay attention: the boolean one, and what SDPA makes of it, a bias in its own dtype."""
    return mask_bytes(sequences, kv_heads, length) * (1 + itemsize)


def gathered_bytes(rows: int, prompt: int, length: int, seen: int, head_dim: int, itemsize: int, layers: int) -> int:
    """What attention over gathered keys holds until the backward pass, where a query sees `seen` entries, and all of
    its prompt; rows: sequences x kv heads. Of one layer, where that is too much to be kept of all of them.
    """
    import torch

    from sparse_rl.attention.kernels.gather import HELD, held_bytes, make_chunks

    evict_at = (torch.arange(length, dtype=torch.int32) + seen).clamp(min=prompt)
    held = rows * held_bytes(make_chunks(evict_at[None]), head_dim, itemsize)
    return held if held > HELD else layers * held


def tiles_bytes(sequences: int, kv_heads: int, length: int) -> int:
    """One layer's tiles in FlexAttention: positions and evict_at, the keys' order and back, and four lists of tiles."""
    from sparse_rl.attention.kernels.flex import padded
    from sparse_rl.attention.kernels.tiles import TILE

    width = padded(length)
    count = width // TILE
    return sequences * kv_heads * (width * (4 + 4 + 8) + length * 8 + 4 * 4 * (count + count**2))


def compares_keys(cache: PolicyConfig) -> bool:
    """Whether a compaction compares every two keys: R-KV's redundancy."""
    return isinstance(cache, RKVConfig) or (isinstance(cache, GKVConfig) and cache.redundancy)


def redundancy_bytes(
    policy: Policy,
    entries: int,
    kv_heads: int,
    head_dim: int,
    sequences: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
) -> int:
    """The transient of R-KV's redundancy, where a policy has it, for as many of the sequences as are taken at a time.

    A tile of similarities in float32, and again in float64; three arrays of keys in float32; a few numbers per entry.
    Triton's kernel, where it is taken for keys of this dtype: of all sequences a copy of the keys, and a few numbers.
    """
    import torch

    from sparse_rl.kernels.redundancy import AT_ONCE, redundancy_choice, similarity_tiles

    if not compares_keys(policy.config):
        return 0
    if device == "cuda" and redundancy_choice(getattr(torch, dtype), head_dim).kernel == "triton":
        return sequences * kv_heads * entries * (2 * head_dim + 24)
    rows = max(last - first for first, last in similarity_tiles(entries))
    at_once = min(sequences, max(1, AT_ONCE[device] // (kv_heads * rows * entries)))
    return at_once * kv_heads * entries * (12 * rows + 12 * head_dim + 64)


# ---- weights and training state ------------------------------------------------------------------------------------


def count_parameters(model: Any) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def adapted_modules(model: Any, lora: LoraConfig) -> list[tuple[str, Any]]:
    """(name, module) of what target_modules names, whatever it is.

    As PEFT has it: `all-linear` leaves out the head, other text is a pattern for whole names, a list holds last names.
    """
    from torch.nn import Linear

    def adapted(name: str, module: Any) -> bool:
        if isinstance(lora.target_modules, list):
            return any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
        if lora.target_modules == "all-linear":
            return isinstance(module, Linear) and module is not model.get_output_embeddings()
        return re.fullmatch(lora.target_modules, name) is not None

    return [(name, module) for name, module in model.named_modules() if adapted(name, module)]


def lora_parameters(model: Any, lora: LoraConfig) -> int:
    """Parameters of rank-r adapters: r (in + out) for every adapted linear layer."""
    from torch.nn import Linear

    linear = [module for _, module in adapted_modules(model, lora) if isinstance(module, Linear)]
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
