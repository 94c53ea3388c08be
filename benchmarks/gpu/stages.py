"""The stages of `python -m benchmarks.gpu`, the most important ones first, and their full and small sizes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.worker import Options
from sparse_rl.models.hub import SHAPES

ENVIRONMENT = "benchmarks.gpu.environment:describe"
LIMIT = 8.0  # minutes; a call of ten minutes then has room for a stage and for the report
BENCH = ("matplotlib", "pandas")  # which sparse-rl bench imports
VLLM = ("vllm", *BENCH)
TRAINING = ("trl", "datasets", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Stage:
    """One measurement.

    place : "module:name" of the generator function, in this package
    minutes : expected minutes on an H100; `--minutes` leaves out a stage that does not fit
    needs : libraries without which the stage does not run, by their import names
    limit : minutes after which the stage is ended
    """

    name: str
    place: str
    minutes: float
    needs: tuple[str, ...] = ()
    limit: float = LIMIT

    @property
    def function(self) -> str:
        return f"benchmarks.gpu.{self.place}"


STAGES = (
    Stage("attention_parity", "kernels:parity", 2.5),  # are the kernels those of the dense float64 reference?
    Stage("attention_speed", "kernels:speed", 6.0),  # under recorded evictions
    Stage("tests_kernels", "environment:kernel_tests", 5.0, ("pytest",)),
    Stage("vllm_modes", "engines:modes", 6.0, VLLM),  # piecewise and full CUDA graphs
    Stage("tests_vllm", "environment:vllm_tests", 7.0, ("pytest", "vllm")),
    Stage("grpo_quickstart", "training:grpo_quickstart", 3.0, TRAINING),  # end to end; the gap in bfloat16
    Stage("compaction", "engines:compaction", 1.5),  # of all layers of a 7B model; kernel launches
    Stage("decoding", "engines:decoding", 6.0, BENCH),  # a 7B model in the hf engine; the share of compactions
    Stage("vllm_1.5b", "engines:small_model", 7.0, VLLM),
    Stage("vllm_7b", "engines:large_model", 7.5, VLLM),
    Stage("vllm_equal_memory", "engines:equal_memory", 6.0, VLLM),  # all caches have the same number of blocks
    Stage("training_steps", "training:steps", 4.0),  # passes of a model over a long sequence
    Stage("grpo_1.5b", "training:grpo_model", 6.0, TRAINING),  # parts of a step; memory beside `doctor`'s prediction
    Stage("running_topk", "kernels:topk", 1.0),
    Stage("redundancy", "kernels:redundancy", 1.0),
    Stage("sampler", "kernels:sampling", 1.0),
    Stage("one_shot_compaction", "engines:one_shot", 4.0, BENCH),  # of a long context
)

VOCABULARY = 512  # prompts have token ids below it, which every model here has
TINY_MODEL = {
    "model_type": "qwen2", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128, "intermediate_size": 192, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "head_dim": 32,
}  # fmt: skip
SIZES: dict[str, tuple[Any, Any]] = {  # name -> full size, small size
    "large_model": (SHAPES["deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"], TINY_MODEL),
    "small_model": (SHAPES["Qwen/Qwen2.5-1.5B-Instruct"], TINY_MODEL),
    "heads": ((28, 4, 128), (4, 2, 32)),  # query heads, kv heads, head dim of attention that is timed alone
    "lengths": ((16384, 32768, 4096), (256, 384)),  # of attention
    "budget": (2048, 64),  # of its evictions
    "dense": (16384, 384),  # longest sequence that is compared with the dense float64 reference
    "topk": ((16384, 64), (600, 2)),  # tokens, kv heads
    "redundancy": ((28, 4, 2176, 128), (2, 2, 96, 32)),  # rows, kv heads, entries, head dim
    "sampler": ((64, 151_936), (4, 2000)),  # rows, vocabulary
    "requests": ((8, 64, 1), (1, 2)),  # of compaction and decoding
    "cache": ({"budget": 512, "period": 128, "window": 16}, {"budget": 48, "period": 16, "window": 8}),
    "decoded": ((512, 129), (48, 48)),  # prompt tokens and generated tokens in the hf engine
    "served": ((64, 16, 256), (2, 4)),  # vLLM's batch sizes
    "lengths_served": ((4096, 16384), (128,)),
    "generated": (512, 48),  # tokens that vLLM generates for each sequence
    "trained": (16384, 384),  # tokens of a training step
    "context": (60_000, 400),  # tokens of the context that is compacted once
    "runs": (7, 2),  # repetitions of a timing
    "grpo": (  # overrides of the recipe
        {"max_steps": 4},
        {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 96},
    ),
    "grpo_model": (  # more for the model with dummy weights
        {"max_completion_length": 512, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2},
    ),
}


def sizes(options: Options) -> Any:
    """Return the sizes as attributes."""
    return SimpleNamespace(**{name: pair[options.small] for name, pair in SIZES.items()})


def config_of(shape: dict[str, Any], **changes: Any) -> Any:
    """Return the configuration of a shape. Attention logits of dummy weights have a deviation of about 2."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**shape, "initializer_range": (2.24 / shape["hidden_size"]) ** 0.5, **changes})


def dummy_model(config: Any, options: Options) -> Any:
    """Return a model with dummy weights, which are drawn on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype)).eval()
