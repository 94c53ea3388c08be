"""Tiny hybrid models of random weights in which attention, decay and convolution all matter for the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tiny import random_prompts
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Rollout
from sparse_rl.attention.interface import NO_MASK, adopt
from sparse_rl.attention.views import make_view
from sparse_rl.models.load import head_of
from sparse_rl.states.mixers import Sequences
from sparse_rl.trace import pack_traces
from trainer.batch import Batch, Example, trace_of

SIZE = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192},
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
}
DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_expand": 2},
    **{"mamba_d_conv": 4, "mamba_chunk_size": 64},
}
GRANITE = {
    **{"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention"] * 2},
    **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, "logits_scaling": 0.8},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {  # name -> settings; the name is the model_type unless they say otherwise
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "qwen3_next": {**DELTA, "num_experts": 0, "mlp_only_layers": []},
    "qwen3_next_experts": {**DELTA, **EXPERTS, "model_type": "qwen3_next", "num_experts": 8},
    "qwen3_5_text": DELTA,
    "olmo_hybrid": DELTA,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "granite_nope": {**MAMBA, **GRANITE, "position_embedding_type": "nope"},
    "granite_rope": {**MAMBA, **GRANITE, "position_embedding_type": "rope"},
    "granite_experts": {**MAMBA, **GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "full_attention", "mlp"] * 2, "num_hidden_layers": 6},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 64},
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128, "lm_head_multiplier": 1.2, "num_hidden_layers": 2},
}


def build(name: str, **changed: Any) -> Any:
    """Return a new model of transformers: logits of attention with a spread of about 2, decays of 1 to 1000 tokens, and
    mixers that add as much as attention.
    """
    values = {**SIZE, **VARIANTS[name], **changed}
    config = AutoConfig.for_model(values.pop("model_type", name), **values)
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = 1
    with torch.no_grad():
        for path, weight in model.named_parameters():
            module, leaf = path.split(".")[-2:]
            if "embed" in path or "lm_head" in path:
                weight.normal_(0, 1.0 if "embed" in path else 0.25, generator=generator)
            elif leaf == "A_log":
                weight.copy_(torch.log(torch.logspace(-3, 0, weight.numel()).view_as(weight)))
            elif leaf == "dt_bias":
                weight.copy_(torch.linspace(-2.5, 0.5, weight.numel()).view_as(weight))
            elif "conv" in path and weight.ndim == 3:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
            elif weight.ndim >= 2:
                scale = 2.5 if module in ("q_proj", "k_proj") else 1.0
                weight.normal_(0, scale / math.sqrt(weight.shape[-1]), generator=generator)
            elif leaf == "bias":
                weight.normal_(0, 0.1, generator=generator)
            elif "norm" in path:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval()


@cache
def hybrid(name: str) -> Any:
    """Return the shared model of that name, with our attention and mixers; tests must not change it."""
    return adopt(build(name))


def prompts(*lengths: int) -> list[list[int]]:
    return random_prompts(lengths, seed=3)


def padded_logprobs(model: Any, rollouts: Sequence[Rollout], let_in: bool = False) -> list[Tensor]:
    """Return the log-probs of completions from rows that are padded on both sides.

    let_in : True hands whole rows to the mixers, with their padding, which is wrong
    """
    width = max(len(r.trace) for r in rollouts) + 3
    starts = [width - 3 - len(r.trace) for r in rollouts]
    rows = [[0] * start + r.prompt_ids + r.completion_ids + [0] * 3 for start, r in zip(starts, rollouts, strict=True)]
    ids, positions = torch.tensor(rows), (torch.arange(width) - torch.tensor(starts)[:, None]).clamp(min=0)
    view = make_view([r.trace for r in rollouts], starts, width, "cpu")
    if let_in:
        view.states = Sequences.right_padded([width] * len(rollouts))
    logits = model(input_ids=ids, position_ids=positions, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return [row[width - 4 - len(r.completion_ids) : width - 4] for row, r in zip(logprobs, rollouts, strict=True)]


def packed_logprobs(model: Any, rollouts: Sequence[Rollout], together: bool = False) -> list[Tensor]:
    """Return the log-probs of completions of which two stand in each row, as a trainer packs them.

    together : True hands each row to the mixers as one sequence, which is wrong
    """
    batch = Batch.make([Example.from_rollout(r) for r in rollouts], torch.device("cpu"), packing=True)
    assert len(batch.rows) < len(rollouts), "nothing is packed"
    traces = [pack_traces([trace_of(example) for example in row]) for row in batch.rows]
    view = make_view(traces, [0] * len(traces), batch.ids.shape[1], "cpu")
    if together:
        view.states = Sequences.right_padded(map(len, traces))
    logits = head_of(model)(batch.hidden_under(model, view))
    logprobs = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    of_examples = logprobs.split([len(example.completion) for example in batch.examples])
    by_trace = {id(example.trace): part for example, part in zip(batch.examples, of_examples, strict=True)}
    return [by_trace[id(r.trace)] for r in rollouts]
