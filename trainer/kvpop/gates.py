"""The retrofit of DMS: trains the gates that decide which tokens are evicted.

The student runs under soft gates (sparse_rl/methods/dms/view.py). KL and CE teach the gates to evict the right tokens,
and a target share sets the number of evicted tokens. The loss of a micro-batch with N completion tokens is

    loss = 1/N sum over tokens of (kl_weight tau^2 KL(teacher || student) + ce_weight CE)
           + weight * max(0, target - mean alpha),       target = 1 - 1 / CR,

where tau is the temperature of the distillation, CE the cross-entropy, and alpha in [0, 1] the value of a gate; an open
gate (1) evicts its token. The mean of alpha is over all tokens, layers and kv heads. The target compression ratio CR
rises linearly from 1 to `compression` over `anneal_steps` steps. If more gates are open than the target asks for, the
last term is 0, and only KL and CE close gates. Validation uses hard gates, as decoding does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparse_rl.attention.windows.view import WindowedView
from sparse_rl.methods.dms.policy import DMS
from sparse_rl.methods.dms.view import GatedView
from sparse_rl.models.base import base_of
from trainer.batches import Batch
from trainer.kvpop.trainer import KVpopTrainer


class GateTrainer(KVpopTrainer):
    """KVpopTrainer that trains the gates of the policy dms instead of scorers."""

    policy: DMS
    summed: tuple[str, ...] = ("kl", "ce", "right", "ratio", "open", "retention", "sequences")

    def compression(self) -> float:
        done = min(1.0, self.state.global_step / max(1, self.args.kvpop.gates.anneal_steps))
        return 1 + (self.policy.config.compression - 1) * done

    def _view(self, student: Any, batch: Batch) -> Any:
        policy, (lengths, prompts) = self.policy.config, batch.sizes()
        base, width = base_of(student), batch.ids.shape[1]
        view = GatedView(
            base.cache_scorers,
            policy,
            lengths,
            prompts=prompts if policy.prefill == "dense" else None,
            temperature=self.args.kvpop.gates.temperature if student.training else None,
            kernel=self.args.attention_kernel,
        )
        return WindowedView.unrecorded(view, base.config, lengths, width, lengths.device, self.args.attention_kernel)

    def _own_loss(self, view: GatedView, count: Tensor) -> tuple[Tensor, ...]:
        share = view.share()
        ratio = (1 - 1 / self.compression() - share).clamp(min=0) * count
        return self.args.kvpop.gates.weight * ratio, ratio, share * count

    def _measured(self) -> dict[str, float]:
        sums = self._sums
        gate_metrics = {"gates_open": sums["open"] / sums["tokens"], "ratio_loss": sums["ratio"] / sums["tokens"]}
        return {**super(KVpopTrainer, self)._measured(), **gate_metrics}
