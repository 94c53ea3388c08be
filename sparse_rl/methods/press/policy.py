"""The policy `press`: an instance of a class of kvpress scores the entries of each prompt.

A press reads the input of an attention layer, which no cache has. So `bound_to` registers a hook on each attention
layer that hands the input of a prefill to the policy. A press scores each prompt alone, without the batch's padding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_rl.attention.families import global_layers, refuse_states
from sparse_rl.errors import UserError, did_you_mean, one_line
from sparse_rl.methods.press.config import PressConfig
from sparse_rl.policies.base import Entries, Policy


class Press(Policy):
    """Only the hf engine calls its `compact`, layer by layer, right after the attention of a prefill."""

    config: PressConfig
    score_reads = ("keys", "values")

    def __init__(self, config: PressConfig) -> None:
        super().__init__(config)
        self.press = make_press(config)
        self._modules: dict[int, Any] = {}  # place of a layer among those without a sliding window -> its attention
        # index of a layer -> keywords of its attention in the last prefill
        self._inputs: dict[int, dict[str, Any]] = {}

    def bound_to(self, model: Any) -> Press:
        refuse_states(model.config, "kvpress does not know the attention of hybrid families", "cache.policy")
        bound = Press(self.config)
        decoder = model.get_decoder()
        bound.press.post_init_from_model(model)
        for place, index in enumerate(global_layers(model.config)):
            attention = decoder.layers[index].self_attn
            attention.rotary_emb = decoder.rotary_emb  # as kvpress does; some presses rotate queries of their own
            bound._modules[place] = attention
            attention.register_forward_pre_hook(bound._take, with_kwargs=True)
        return bound

    def _take(self, module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        view = keywords.get("kv_view")
        if view is not None and view.policy is self:
            self._inputs[module.layer_idx] = keywords

    def score(self, layer: int, entries: Entries) -> Tensor:
        assert entries.keys is not None and entries.values is not None
        keywords = self._inputs.pop(self._modules[layer].layer_idx)
        hidden, (cos, sin) = keywords["hidden_states"], keywords["position_embeddings"]
        width, scores = entries.keys.shape[2], []
        for row, length in enumerate(entries.lengths.tolist()):
            one = slice(row, row + 1)
            embeddings = tuple(part[one if len(part) > 1 else slice(1), :length] for part in (cos, sin))
            given = {
                "hidden_states": hidden[one, :length],
                "position_embeddings": embeddings,
                "cache_position": torch.arange(length, device=hidden.device),
            }
            keys, values = entries.keys[one, :, :length], entries.values[one, :, :length]
            try:
                row_scores = self.press.score(self._modules[layer], hidden[one, :length], keys, values, None, given)
            except Exception as error:  # such as an assertion that the prompt is longer than a window
                wrong = f"{self.config.press} cannot score a prompt of {length} tokens: {one_line(error)}"
                raise UserError(wrong, "cache.press") from error
            scores.append(F.pad(row_scores.float(), (0, width - length)))
        return torch.cat(scores)


def make_press(config: PressConfig) -> Any:
    """Return an instance of the press. Raises UserError if kvpress is missing, or if the press cannot be a policy."""
    kvpress = kvpress_module()
    names = [name for name in dir(kvpress) if name.endswith("Press")]
    if config.press not in names:
        raise UserError(f"kvpress has no {config.press!r}{did_you_mean(config.press, names)}", "cache.press")
    kind: Any = getattr(kvpress, config.press)
    base = kvpress.ScorerPress
    if not issubclass(kind, base) or kind is base or kind.compress is not base.compress:
        can = "only presses that evict the entries with the lowest scores, in every kv head as many, can be a policy"
        raise UserError(f"{config.press}: {can} (docs/elsewhere.md)", "cache.press")
    if config.press == "ObservedAttentionPress":
        raise UserError(f"{config.press} needs the weights of attention, which are not kept here", "cache.press")
    try:
        return kind(compression_ratio=config.compression_ratio, **config.options)
    except Exception as error:  # kvpress checks its arguments by assertions
        takes = inspect.signature(kind)
        raise UserError(f"{config.press}{takes} refuses {config.options}: {error}", "cache.options") from error


def kvpress_module() -> Any:
    """Import kvpress, and remove the wrappers that its import puts around transformers' attention functions."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = dict(ALL_ATTENTION_FUNCTIONS.items())
    try:
        import kvpress
    except ImportError as error:
        missing = f"kvpress is not installed: {error}; pip install 'sparse-rl[kvpress]'"
        raise UserError(missing, "cache.press") from error
    for name, function in before.items():
        ALL_ATTENTION_FUNCTIONS[name] = function
    return kvpress
