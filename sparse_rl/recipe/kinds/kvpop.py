"""kind: kvpop, the retrofit of a learned policy, `kvpop` or `dms`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sparse_rl.config import flat
from sparse_rl.errors import UserError
from sparse_rl.methods.config import KVpopPolicyConfig, PolicyConfig
from sparse_rl.recipe.kinds.taught import TaughtRecipe
from trainer.kvpop.config import KVpopConfig, KVpopLossConfig, KVpopTrainingConfig


@dataclass(frozen=True, kw_only=True)
class KVpopRecipe(TaughtRecipe):
    """Retrofit of a learned policy, `kvpop` or `dms`, whose scorers are trained together with the model.

    cache : {policy: kvpop or dms, parameters of the policy}
    """

    kind: ClassVar[str] = "kvpop"
    cache: PolicyConfig
    training: KVpopTrainingConfig = flat(KVpopTrainingConfig)
    loss: KVpopLossConfig = flat(KVpopLossConfig)
    kvpop: KVpopConfig = flat(KVpopConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cache.schedule.before_attending:
            raise UserError("recipes of kind kvpop train kvpop or dms", "cache.policy")
        if self.lora is not None:
            raise UserError(
                "kind kvpop trains the whole model, or with train_base: false only the scorers; remove lora", "lora"
            )
        policy: Any = self.cache
        if policy.scorer.name == "recency" and not self.kvpop.train_base:
            raise UserError("the scorer recency has no parameters to train; set train_base: true", "train_base")
        self.refuse_own_groups()
        if self.kvpop.max_length < policy.schedule.first(1):
            self.warnings.append(
                f"rows of at most {self.kvpop.max_length} tokens never exceed the budget: nothing is evicted"
            )

    def foresees(self) -> bool:
        return isinstance(self.cache, KVpopPolicyConfig)

    def describe_batches(self, rows: int) -> str:
        if not self.kvpop.packing:
            return super().describe_batches(rows)
        length = self.kvpop.max_length
        return f"{self.update_rows()} rows of {length} tokens a step; the number of rows is known only after packing"

    def longest_row(self, prompt: int) -> int | None:
        return self.kvpop.max_length
