"""The sizes of all stages: full sizes for a GPU, and small sizes, with which a CPU runs every stage in minutes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sparse_rl.models.known import SHAPES

SINKS, WINDOW = 4, 16
VOCABULARY = 512  # prompts have token ids below it, which every model here has
TINY_MODEL = {
    "model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128, "intermediate_size": 192, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "head_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Sizes of the stages.

    large_model, small_model : shapes of the two models, as arguments of AutoConfig.for_model
    heads : (query heads, kv heads, head dim) of attention that is timed alone
    lengths : sequence lengths of attention
    budget : budget of the recorded evictions
    dense : longest sequence that is compared with the dense float64 reference
    masks : longest sequence for which an S x S mask is made
    topk, redundancy, sampler : (tokens, kv heads), (rows, kv heads, entries, head dim), (rows, vocabulary)
    requests : numbers of requests of compaction and decoding
    cache : budget, period and window of compaction and decoding
    decoded : (prompt tokens, generated tokens) of decoding in the hf engine
    served : vLLM's batch sizes
    contexts : vLLM's sequence lengths
    generated : tokens that vLLM generates for each sequence
    trained : tokens of the row of a training step
    grpo : overrides of the recipe of both GRPO stages; grpo_model : more for the model with dummy weights
    context : tokens of the context that is compacted once
    context_queries : maximum number of reference queries of this context for each kv head
    runs : repetitions of a timing
    """

    large_model: dict[str, Any]
    small_model: dict[str, Any]
    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    budget: int
    dense: int
    masks: int
    topk: tuple[int, int]
    redundancy: tuple[int, int, int, int]
    sampler: tuple[int, int]
    requests: tuple[int, ...]
    cache: dict[str, int]
    decoded: tuple[int, int]
    served: tuple[int, ...]
    contexts: tuple[int, ...]
    generated: int
    trained: int
    context: int
    context_queries: int
    runs: int
    grpo: dict[str, Any] = field(default_factory=dict)
    grpo_model: dict[str, Any] = field(default_factory=dict)


FULL = Sizes(
    large_model=SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"],
    small_model=SHAPES["Qwen/Qwen2.5-1.5B-Instruct"],
    heads=(28, 4, 128),
    lengths=(16384, 32768, 4096),
    budget=2048,
    dense=16384,
    masks=32768,
    topk=(16384, 64),
    redundancy=(28, 4, 2176, 128),
    sampler=(64, 151_936),
    requests=(8, 64, 1),
    cache={"budget": 512, "period": 128, "window": 16},
    decoded=(512, 129),
    served=(64, 16, 256),
    contexts=(4096, 16384),
    generated=512,
    trained=16384,
    context=60_000,
    context_queries=50_000,
    runs=7,
    grpo={"max_steps": 4},
    grpo_model={"max_completion_length": 512, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
)
SMALL = Sizes(
    large_model=TINY_MODEL,
    small_model=TINY_MODEL,
    heads=(4, 2, 32),
    lengths=(256, 384),
    budget=64,
    dense=384,
    masks=384,
    topk=(600, 2),
    redundancy=(2, 2, 96, 32),
    sampler=(4, 2000),
    requests=(1, 2),
    cache={"budget": 48, "period": 16, "window": 8},
    decoded=(48, 48),
    served=(2, 4),
    contexts=(128,),
    generated=48,
    trained=384,
    context=400,
    context_queries=400,
    runs=2,
    grpo={"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 96},
    grpo_model={"gradient_accumulation_steps": 2},
)


def sizes(small: bool) -> Sizes:
    return SMALL if small else FULL


def dtype_name(device: str) -> str:
    """Return the dtype that the stages compute in: bfloat16 on a GPU, float32 on a CPU."""
    return "bfloat16" if device == "cuda" else "float32"


def config_of(shape: dict[str, Any], **changes: Any) -> Any:
    """Return the transformers configuration of a shape.

    The spread of dummy weights gives attention logits a standard deviation of about 2, so attention is not uniform.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**shape, "initializer_range": (2.24 / shape["hidden_size"]) ** 0.5, **changes})


def dummy_model(config: Any, device: str, dtype: str) -> Any:
    """Return a model with dummy weights, which are drawn on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def random_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator).tolist()
