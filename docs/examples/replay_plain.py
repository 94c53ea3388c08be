"""Train a plain transformers model for one step under recorded evictions, without importing sparse-rl.

python docs/examples/replay_plain.py FOLDER MODEL, where `sparse-rl rollout` wrote FOLDER with the model MODEL
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from read_rollouts import read_rollouts
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM


def attend(module, query, key, value, attention_mask, scaling=None, evict_at=None, **_):
    """Attention in which query q sees token t if t <= q < evict_at[t]. evict_at : [rows, layers, kv heads, tokens]"""
    tokens = torch.arange(key.shape[2], device=key.device)
    gone = evict_at[:, module.layer_idx].repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    query_at = tokens[:, None]
    sees = (tokens <= query_at) & (query_at < gone[:, :, None]) | (tokens == query_at)  # padding sees itself
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("replay", attend)
AttentionMaskInterface.register("replay", lambda *_, **__: None)  # `attend` makes its own mask


def batch(rollouts, device="cpu"):
    """Pad rollouts on the right, where no query of a row sees the padding."""
    rows = [torch.tensor(r["prompt_ids"] + r["completion_ids"]) for r in rollouts]
    gone = [torch.tensor(r["evict_at"]).movedim(2, 0) for r in rollouts]
    pad = torch.nn.utils.rnn.pad_sequence
    drawn = [torch.arange(len(row)) >= len(r["prompt_ids"]) for row, r in zip(rows, rollouts, strict=True)]
    sampled = [torch.tensor([0.0] * len(r["prompt_ids"]) + r.get("model_logprobs", r["logprobs"])) for r in rollouts]
    columns = pad(rows, True), pad(gone, True).movedim(1, 3), pad(drawn, True)[:, 1:], pad(sampled, True)[:, 1:]
    return [column.to(device) for column in columns]


def logprobs(model, ids, evict_at, temperature):
    """Return the log-prob of each token but the first, float [rows, tokens - 1]. Keywords reach `attend`."""
    logits = model(input_ids=ids, evict_at=evict_at, use_cache=False).logits[:, :-1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def step(model, rollouts, advantages, temperature):
    """Compute the gradients of one policy gradient step, and return the largest gap between sampler and trainer."""
    ids, evict_at, drawn, sampled = batch(rollouts, next(model.parameters()).device)
    ours = logprobs(model, ids, evict_at, temperature)
    ratio = (ours - sampled).exp() * drawn
    (-(ratio.sum(1) / drawn.sum(1)) * torch.tensor(advantages, device=ids.device)).mean().backward()
    return (ours - sampled)[drawn].abs().max().item()


if __name__ == "__main__":
    folder, name = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="replay")
    rollouts = list(read_rollouts(folder))[:8]
    sampling = json.loads((Path(folder) / "rollouts.json").read_text())["sampling"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    advantages = [(-1.0) ** i for i in range(len(rollouts))]  # yours come from rewards
    print("largest gap:", step(model, rollouts, advantages, sampling["temperature"]))
    optimizer.step()
