"""Runs GRPO's forward pass of the trained or the reference model: TRL's fused head, and each row under its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import _ForwardRedirection

from sparse_rl.attention.interface import NO_MASK
from sparse_rl.attention.views.factory import make_view
from sparse_rl.experts.routing import balancing_loss
from sparse_rl.experts.view import RoutedView
from sparse_rl.models.base import base_of
from sparse_rl.trace import EvictionTrace
from trainer.grpo.arguments import SparseGRPOArguments
from trainer.grpo.rows import Learned
from trainer.scored.loss import ScorerLoss


class ReplayedForward:
    """Computes log-probs of rows that TRL has padded: prompts on the left, completions on the right."""

    def __init__(self, accelerator: Any, args: SparseGRPOArguments, scorer_loss: ScorerLoss | None) -> None:
        self.accelerator, self.args, self.scorer_loss = accelerator, args, scorer_loss
        self.redirect = _ForwardRedirection()

    def __call__(
        self, model: Any, ids: Tensor, mask: Tensor, keep: int, traces: Sequence[EvictionTrace], balance: bool = False
    ) -> tuple[Any, Learned | None]:
        """Return the model's output and the auxiliary losses. The losses are None if nothing besides GRPO learns.

        The output holds log_probs and entropy, float [rows, width - 1], valid for the last `keep` tokens; and aux_loss,
        the load-balancing loss of experts, if `balance` is True.

        ids, mask : token ids, and 1 for tokens and 0 for padding, int64 [rows, width]
        keep : width of the completions, the last columns of `ids`
        traces : trace of each row
        balance : True computes the load-balancing loss
        """
        starts = mask.long().argmax(-1)[:, None]
        columns = torch.arange(ids.shape[1], device=ids.device)
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-keep] = -100
        learns, positions, real = torch.is_grad_enabled(), (columns - starts).clamp(min=0), mask
        student: Any = self.accelerator.unwrap_model(model)
        if scorers_learn := learns and self.scorer_loss is not None:
            # Rotate rows to begin at column 0: padding in front of them would enter the scorers' state.
            order, lengths, prompts = (
                (columns + starts) % ids.shape[1],
                mask.long().sum(1),
                mask[:, :-keep].long().sum(1),
            )
            view: Any = self.scorer_loss.view(
                student, lengths, prompts, ids.shape[1], kernel=self.args.attention_kernel, traces=traces
            )
            ids, positions, labels = ids.gather(1, order), columns.expand_as(ids), labels.gather(1, order)
            real = mask.gather(1, order)
        else:
            kernel, through = self.args.attention_kernel, self.args.match_gradient == "through"
            view = make_view(traces, starts.flatten().tolist(), ids.shape[1], ids.device, kernel, through)
        if balance and not hasattr(view, "choices"):  # full attention in training replays no experts
            rows, width = ids.shape
            view = RoutedView.unrecorded(view, base_of(student).config, rows, width, ids.device)
        others = learns and hasattr(view, "losses")
        if not others and not balance:
            return self._forward(model, ids, positions, labels, view), None

        def with_losses(*inputs: Any) -> tuple[Any, Tensor | None]:
            out = self._forward(student.forward, *inputs)
            if balance:
                out.aux_loss = balancing_loss(view.choices, real)
            return out, torch.stack(list(view.losses.values())) if others else None

        # DDP and DeepSpeed track the outputs of their forward: a loss outside these outputs would get no gradient.
        out, losses = self.redirect(model, student, with_losses, ids, positions, labels, view)
        if losses is None:
            return out, None
        if scorers_learn:
            back = (columns[:-1] - starts).clamp(min=0)
            out.log_probs, out.entropy = out.log_probs.gather(1, back), out.entropy.gather(1, back)
        return out, Learned(losses, getattr(view, "recalls", {}))

    def _forward(self, model: Any, ids: Tensor, positions: Tensor, labels: Tensor, view: Any) -> Any:
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": NO_MASK.to(ids.device)}
        with self.accelerator.autocast():
            return model(**inputs, kv_view=view, labels=labels, fused_lm_head=True)
