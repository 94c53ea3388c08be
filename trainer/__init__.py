"""Training under recorded evictions. The trainers take values, never recipes.

    args = SparseGRPOArguments(output_dir="runs/mine", num_generations=8, max_completion_length=512)
    cache = {"policy": "gkv", "budget": 128, "window": 16, "period": 32}
    SparseGRPOTrainer(model="path/to/model", reward_funcs=[reward], train_dataset=rows, args=args, cache=cache).train()

docs/internals.md lists every part of TRL and transformers that this package overrides or reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparse_rl.lazy import public_names

if TYPE_CHECKING:
    from trainer.distill import DistillArguments, DistillTrainer
    from trainer.grpo.trainer import SparseGRPOArguments, SparseGRPOTrainer

__getattr__ = public_names(__name__, "rollout")

__all__ = ["DistillArguments", "DistillTrainer", "SparseGRPOArguments", "SparseGRPOTrainer"]
