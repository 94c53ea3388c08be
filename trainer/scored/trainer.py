"""A model that carries a learned policy's scorers, in any training: kept with it, and the same in an engine of its own.

transformers knows no scorers: they are written beside each model that is saved. What an engine holds of them is
compared with the trainer's: its record is replayed whoever made it, so stale ones would not show in the replay gap.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from sparse_rl.errors import StoppedError
from sparse_rl.methods.kvpop.learned import LearnedPolicy
from sparse_rl.methods.kvpop.policy import KVpop
from sparse_rl.methods.kvpop.scorers.base import NOT_DECAYED, head_digests
from sparse_rl.models.base import base_of
from sparse_rl.models.directory import SCORERS, check_scorers, load_scorers, read_scorers, save_policy, write_scorers
from sparse_rl.policies.base import Policy
from trainer.scored.config import ScorersConfig
from trainer.scored.loss import ScorerLoss


class Scored(Trainer):
    """A Trainer of models that may carry scorers, as the module list `cache_scorers`.

    learned_policy : the policy that the scorers are of; None where the model has none
    scorer_learning_rate : None where the scorers do not learn
    scorer_loss : from which they learn, where they learn by the boundary loss
    """

    learned_policy: Policy | None = None
    scorer_learning_rate: float | None = None
    scorer_loss: ScorerLoss | None = None

    def carry_scorers_of(self, policy: Policy, learn: ScorersConfig | None) -> None:
        """Keep the scorers of an engine's policy, if it has any, with the model. learn : how they go on learning"""
        self.learned_policy = policy if policy.layered_parameters else None
        if learn is not None:
            self.scorer_learning_rate = learn.learning_rate
            self.scorer_loss = ScorerLoss(cast(KVpop, policy).config, learn.target, learn.boundary)
            base_of(self.model).cache_scorers.requires_grad_(True)

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """The training's, over the model, at its learning rate, and over scorers that learn, at theirs."""
        if self.scorer_learning_rate is None:
            return super().create_optimizer(*([] if model is None else [model]))
        if self.optimizer is None:
            whole: Any = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(whole))
            groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
            for name, weight in whole.named_parameters():
                if weight.requires_grad:
                    scorer = SCORERS in name.split(".")
                    key = scorer, name.split(".")[-1] not in NOT_DECAYED if scorer else name in decayed
                    groups.setdefault(key, []).append(weight)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, whole)
            rates, decays = (self.args.learning_rate, self.scorer_learning_rate), (0.0, self.args.weight_decay)
            ordered = [(*key, groups[key]) for key in sorted(groups)]
            self.optimizer = kind(
                [
                    {"params": weights, "lr": rates[scorer], "weight_decay": decays[decay], "scorer": scorer}
                    for scorer, decay, weights in ordered
                ],
                **options,
            )
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model without its scorers, which transformers would not know, and these beside it."""
        if self.learned_policy is None:
            super()._save(output_dir, state_dict)
            return
        weights = dict(base_of(self.model).state_dict() if state_dict is None else state_dict)
        super()._save(output_dir, state_dict)  # takes the scorers out of what it is given
        folder = str(output_dir or self.args.output_dir)
        write_scorers(folder, weights)
        save_policy(folder, self.learned_policy)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.learned_policy is not None:
            read_scorers(resume_from_checkpoint, base_of(self.model))


def carry_scorers(model: Any, policy: Policy, directory: str) -> Any:
    """The model; under a learned policy with the scorers of its directory, which are not trained.

    Raises UserError where the directory has none, or others.
    """
    if isinstance(policy, LearnedPolicy) and not hasattr(model, SCORERS):
        check_scorers(directory, policy)
        load_scorers(directory, model, policy)
        getattr(model, SCORERS).to(model.dtype).requires_grad_(False)  # ZeRO-3 wants one dtype
    return model


def check_scorers_in(engine: Any, weights: dict[str, Any]) -> None:
    """Raise StoppedError where an engine holds other scorers than these, by their names in a checkpoint."""
    prefix = f"{SCORERS}."
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    held = engine.scorer_digests() if own else {}
    wrong = [name for name, value in head_digests(own).items() if held.get(name) != value]
    if wrong:
        raise StoppedError(
            f"the engine's scorers are not the trainer's ({len(wrong)} of {len(own)} tensors, {wrong[0]} among them): "
            "it would evict by stale ones, which no replay gap shows. The last checkpoint is untouched"
        )
