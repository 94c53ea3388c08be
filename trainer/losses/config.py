"""What the losses of the taught trainings are told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.config import AtLeastOne, Configuration, NonNegative, Positive, PositiveInt, Probability
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillationLossConfig(Configuration):
    """The loss of one token against a teacher (trainer/losses/distillation.py), and how it is computed.

    temperature : tau, of both distributions, and of sampling
    divergence, jsd_beta : forward KL(teacher || student), reverse, or the generalised JSD between them
    top_k : the teacher's most probable tokens that count one by one, the rest as one; None: the whole vocabulary
    renormalise : drop the rest instead
    kl_weight, ce_weight : of tau^2 KL, and of the cross-entropy with the completions
    chunk : positions whose logits are alive at a time
    """

    temperature: Positive = 1.0
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    jsd_beta: Probability = 0.5
    top_k: PositiveInt | None = None
    renormalise: bool = False
    kl_weight: NonNegative = 1.0
    ce_weight: NonNegative = 0.0
    chunk: PositiveInt = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_weight == 0 and self.ce_weight == 0:
            raise UserError("one of kl_weight and ce_weight must be above 0", "kl_weight")
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            raise UserError("must be between 0 and 1; the ends are forward and reverse", "jsd_beta")
        if self.renormalise and self.top_k is None:
            raise UserError("is about the teacher's top k; name top_k", "renormalise")


@dataclass(frozen=True, kw_only=True)
class BoundaryConfig(Configuration):
    """The scorers' loss (trainer/losses/boundary.py).

    temperature : tau
    margin, margin_floor, margin_temperature : weigh pairs by the target's margin; omega_min and tau_omega
    balance_min, balance_max : c_min and c_max: the weights of kept and dropped pairs, 1 / (2 their share), stay between
    queries : drawn per row; None: all
    late : the share of them that is drawn with a bias towards the row's end
    """

    temperature: Positive = 1.0
    margin: bool = True
    margin_floor: Probability = 0.1
    margin_temperature: Positive = 1.0
    balance_min: Probability = 0.0
    balance_max: AtLeastOne = 10.0
    queries: PositiveInt | None = 1024
    late: Probability = 0.5
