"""Settings of the loss of training with a teacher. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.config import Configuration, NonNegative, Positive, PositiveInt, Probability
from sparse_rl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DistillationLossConfig(Configuration):
    """Settings of the loss per token of training with a teacher (trainer/losses/distillation.py).

    temperature : temperature of the teacher's and the student's distribution, and of sampling; tau in the formulas
    divergence : forward is KL(teacher || student), reverse is KL(student || teacher), and jsd is the generalised
        Jensen-Shannon divergence
    jsd_beta : weight of the teacher in the generalised Jensen-Shannon divergence
    top_k : number of the teacher's most probable tokens that the divergence distinguishes; all other tokens count as
        one outcome. None means the whole vocabulary
    renormalise : leave all other tokens out, and renormalise both distributions over the top_k tokens
    kl_weight : weight of the divergence, which is also multiplied by tau^2
    ce_weight : weight of the cross-entropy of the completion tokens
    chunk : number of positions whose logits are in memory at a time
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
            raise UserError("must be above 0 and below 1; for 0 or 1 use divergence forward or reverse", "jsd_beta")
        if self.renormalise and self.top_k is None:
            raise UserError("needs the teacher's top k; set top_k", "renormalise")
