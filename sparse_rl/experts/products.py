"""The experts of a layer on a CPU, by products whose rounding does not depend on the number of tokens.

The tokens for which an expert was chosen form the expert's batch, so a sampler and a trainer never multiply matrices of
equal shapes. transformers' `grouped_mm` and `eager` round differently for few rows: by up to 2e-5 of a log-prob on a
trained model. The rounding of `batched_mm` does not depend on the rows, but `batched_mm` takes 4 to 5 times as long. On
other devices transformers' own `grouped_mm` runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from sparse_rl.kernels.products import ROWS

EXPERTS = "sparse_rl"
"""Name of `experts_forward` among transformers' implementations of experts."""


def experts_forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum of each token's experts: [tokens, hidden size]; transformers defines the signature.

    module : holds gate_up_proj [experts, 2 I, hidden size] and down_proj [experts, hidden size, I]
    hidden : [tokens, hidden size]
    chosen : the experts of each token, int [tokens, K]
    weights : the factor of each of these experts, float [tokens, K]
    """
    if hidden.device.type != "cpu":
        return grouped_mm_experts_forward(module, hidden, chosen, weights)
    outputs, places = [], []
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        rows = F.pad(hidden[token], (0, 0, 0, -len(token) % ROWS))
        inner = module._apply_gate(F.linear(rows, module.gate_up_proj[expert]))
        output = F.linear(inner, module.down_proj[expert])[: len(token)]
        outputs.append(output * weights[token, choice, None])
        places.append(token * chosen.shape[1] + choice)
    by_choice = torch.cat(outputs)[torch.cat(places).argsort()]
    return by_choice.view(*chosen.shape, -1).sum(1).to(hidden.dtype)  # summed in the order of the router's choice


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)
