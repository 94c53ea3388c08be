"""What the losses of the taught trainings are told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.config import Configuration, NonNegative, Positive, PositiveInt, Probability
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
