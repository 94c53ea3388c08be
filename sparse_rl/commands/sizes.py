"""Bytes that a run takes, as pure functions of shapes and policies. memory.py says which of them a recipe needs.

Caches, traces, masks, weights and the optimizer's state are counted exactly; activations are an estimate. Legend: B
sequences, S tokens, L layers, Hkv kv heads.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainer.config import LaunchConfig, LoraConfig

if TYPE_CHECKING:
    from rollout.context import PromptCacheConfig
    from sparse_rl.policies.base import Policy
    from sparse_rl.policies.config import ClusteredConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


# ---- caches, traces, masks -----------------------------------------------------------------------------------------


def cache_bytes(entries: int, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one sequence that holds `entries` per kv head."""
    return 2 * layers * kv_heads * head_dim * entries * itemsize


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


def redundancy_bytes(
    policy: Policy, entries: int, kv_heads: int, head_dim: int, sequences: int = 1, device: str = "cpu"
) -> int:
    """The transient of R-KV's redundancy, where a policy has it, for as many of the sequences as are taken at a time.

    A tile of similarities in float32, and again in float64; three arrays of keys in float32; a few numbers per entry.
    """
    from sparse_rl.policies.scored_window import AT_ONCE, GKV, RKV, similarity_tiles

    if not (isinstance(policy, RKV) or (isinstance(policy, GKV) and policy.config.redundancy)):
        return 0
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
