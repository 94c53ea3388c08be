"""Corrections to vLLM's model code, in engines of ours: vLLM must compute the function that the trainer computes.

- Ministral 3 multiplies a query by a factor that grows with its position. A Hugging Face checkpoint has the factor's
  constants in `rope_parameters`, but vLLM reads them only from `llama_4_scaling` (vLLM issue 48621).
- vLLM's Transformers backend, which runs the families that vLLM has no code for, replaces methods of transformers'
  own classes. A model of the trainer in the same process would then fail.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from rollout.vllm.compat.arguments import KEY


def correct_models() -> None:
    """Make vLLM correct its configuration of a model when it reads the configuration."""
    from vllm.engine.arg_utils import EngineArgs

    create: Any = EngineArgs.create_model_config

    @wraps(create)
    def create_and_correct(self: Any) -> Any:
        model_config = create(self)
        if KEY in (self.additional_config or {}):
            scale_queries(model_config.hf_text_config)
            if model_config.using_transformers_backend():
                keep_transformers_classes()
        return model_config

    EngineArgs.create_model_config = create_and_correct  # type: ignore[method-assign]


def scale_queries(config: Any) -> None:
    """Give a model's configuration the entry `llama_4_scaling` if its `rope_parameters` have the two constants."""
    rope = getattr(config, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is not None and getattr(config, "llama_4_scaling", None) is None:
        length = rope["original_max_position_embeddings"]
        config.llama_4_scaling = {"beta": beta, "original_max_position_embeddings": length}


def keep_transformers_classes() -> None:
    """Stop vLLM's Transformers backend from replacing methods of transformers' classes, if engines run in this process.

    The replacements compile the model. A CPU engine does not compile; a GPU engine runs such a family uncompiled if it
    shares the trainer's process.
    """
    from vllm import envs
    from vllm.model_executor.models.transformers.base import Base

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        Base._decorate_for_torch_compile = lambda self: None  # type: ignore[method-assign]
