"""TRL's GRPOConfig, made from ours in one place."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import trl

from sparse_rl.attention.interface import ATTENTION
from trainer.arguments import ReplayedArguments
from trainer.grpo.config import SparseGRPOConfig
from trainer.scored.config import ScorersConfig


@dataclass
class SparseGRPOArguments(ReplayedArguments, trl.GRPOConfig):
    """TRL's GRPOConfig with our configuration in it; made by `grpo_arguments`, so that both say the same.

    sparse : what is asked for; the trainer reads from here what TRL does not know
    attention_kernel : one of ATTENTION_KERNELS
    match_gradient : through or constant; see trainer.config.ReplayConfig
    scorers : how a learned policy's go on learning; None: they do not
    """

    kind: ClassVar[str] = "grpo"
    sparse: SparseGRPOConfig = field(default_factory=SparseGRPOConfig)
    attention_kernel: str = "gather"
    match_gradient: str = "through"
    scorers: ScorersConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sparse.check_options(vars(self))
        if self.sparse.importance_correction != "none":
            self.vllm_importance_sampling_mode = self.sparse.importance_correction
            self.vllm_importance_sampling_clip_max = self.sparse.importance_clip


def grpo_arguments(
    sparse: SparseGRPOConfig, *, model_init_kwargs: dict[str, Any] | None = None, **options: Any
) -> SparseGRPOArguments:
    """The arguments of a SparseGRPOTrainer.

    options : further ones of TRL and transformers (trainer.arguments.training_options), and the above
    Raises UserError for what we or they refuse.
    """
    theirs = {one.name for one in dataclasses.fields(trl.GRPOConfig)}
    shared = {one.name: getattr(sparse, one.name) for one in dataclasses.fields(sparse) if one.name in theirs}
    shared["top_k"] = sparse.top_k or 0
    shared["model_init_kwargs"] = {**(model_init_kwargs or {}), "attn_implementation": ATTENTION}
    return SparseGRPOArguments(sparse=sparse, **shared, **options)
