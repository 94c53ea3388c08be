"""Base of all trainers: saves a learned policy's scorers with the model, trains them, and checks the engine's scorers.

transformers cannot save scorers, so they are written beside each saved model. The engine's scorers are compared with
the trainer's, because the replay gap does not reveal stale scorers: recorded evictions are replayed in any case.
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
    """A Trainer for models that may carry scorers, in the module list `cache_scorers`.

    learned_policy : policy of the scorers; None if the model has no scorers
    scorer_learning_rate : learning rate of the scorers; None if the scorers are not trained
    scorer_loss : boundary loss of the scorers; None if it is not used
    """

    learned_policy: Policy | None = None
    scorer_learning_rate: float | None = None
    scorer_loss: ScorerLoss | None = None

    def carry_scorers_of(self, policy: Policy, learn: ScorersConfig | None) -> None:
        """Save the scorers with the model if the engine's policy has scorers; also train them if `learn` is given."""
        self.learned_policy = policy if policy.layered_parameters else None
        if learn is not None:
            self.scorer_learning_rate = learn.learning_rate
            self.scorer_loss = ScorerLoss(cast(KVpop, policy).config, learn.target, learn.boundary)
            base_of(self.model).cache_scorers.requires_grad_(True)

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Create the optimizer. Scorers that are trained form parameter groups with their own learning rate."""
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
        if self.learned_policy is None:
            super()._save(output_dir, state_dict)
            return
        weights = dict(base_of(self.model).state_dict() if state_dict is None else state_dict)
        super()._save(output_dir, state_dict)  # removes the scorers from its state_dict
        folder = str(output_dir or self.args.output_dir)
        write_scorers(folder, weights)
        save_policy(folder, self.learned_policy)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.learned_policy is not None:
            read_scorers(resume_from_checkpoint, base_of(self.model))


def carry_scorers(model: Any, policy: Policy, directory: str) -> Any:
    """Return the model. If the policy is learned, first attach the scorers that `directory` contains, frozen.

    Raises UserError if the directory contains no scorers, or scorers of another policy.
    """
    if isinstance(policy, LearnedPolicy) and not hasattr(model, SCORERS):
        check_scorers(directory, policy)
        load_scorers(directory, model, policy)
        getattr(model, SCORERS).to(model.dtype).requires_grad_(False)  # ZeRO-3 needs a single dtype
    return model


def check_scorers_in(engine: Any, weights: dict[str, Any]) -> None:
    """Raise StoppedError if an engine's scorers differ from the scorers in the trainer's `weights`."""
    prefix = f"{SCORERS}."
    scorers = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    held = engine.scorer_digests() if scorers else {}
    wrong = [name for name, value in head_digests(scorers).items() if held.get(name) != value]
    if wrong:
        raise StoppedError(
            f"the engine's scorers are not the trainer's ({len(wrong)} of {len(scorers)} tensors, such as {wrong[0]}): "
            "evictions by stale scorers would not show in the replay gap. The last checkpoint is untouched"
        )
