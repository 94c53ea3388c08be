"""Cartridges (arXiv 2506.06266): a compacted context that gradient descent trains, the baseline of Attention Matching
(section 4, appendix B.3).

A cartridge has as many entries per kv head as a compaction leaves, and starts as the first tokens of the context. Adam
minimises KL(full cache || cartridge) on the answers of self-study, through the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollout.context.cache import Context, LayerEntries
from rollout.context.config import CartridgeConfig, PromptCacheConfig
from rollout.context.reader import Conversation, Reader, Stages, conversations
from sparse_rl.policies.cache import at_slots


class Cartridge:
    """The entries of a context in training, all but the first `fixed`, in float32 or wider. Biases are trained only if
    they were fitted. `context` rounds to the dtype of the start.
    """

    def __init__(self, start: Context, fixed: int) -> None:
        self.start, self.fixed = start, fixed
        self.of_layer = [
            [
                _precise(x[:, :, fixed:].detach()).clone().requires_grad_(x is not layer.bias or start.fitted)
                for x in (layer.keys, layer.values, layer.bias)
            ]
            for layer in start.layers
        ]

    def parameters(self) -> list[Tensor]:
        return [x for layer in self.of_layer for x in layer if x.requires_grad]

    def context(self) -> Context:
        """Return the current context, with its entries in the autograd graph."""
        layers = []
        for layer, trained in zip(self.start.layers, self.of_layer, strict=True):
            old = layer.keys, layer.values, layer.bias
            keys, values, bias = (
                torch.cat([x[:, :, : self.fixed], y.to(x.dtype)], dim=2) for x, y in zip(old, trained, strict=True)
            )
            layers.append(LayerEntries(keys, values, bias, layer.positions))
        return replace(self.start, layers=layers, fitted=True)


def beginning(whole: Context, kept: int, first: int, last: int) -> Context:
    """Return the fixed entries (`first` at the start, `last` at the end) and then the first `kept` other entries."""
    count = len(whole.tokens)
    stays = torch.tensor([*range(first), *range(count - last, count), *range(first, first + kept)])
    layers = []
    for layer in whole.layers:
        index = stays.to(layer.keys.device).expand(*layer.keys.shape[:2], -1)
        bias, positions = layer.bias.gather(2, index), layer.positions.gather(2, index)
        layers.append(LayerEntries(at_slots(layer.keys, index), at_slots(layer.values, index), bias, positions))
    return Context(whole.tokens, layers, False, of_windows=whole.of_windows)


def train(
    cartridge: Cartridge, whole: Context, texts: Sequence[Conversation], settings: CartridgeConfig, reader: Reader
) -> Iterator[int]:
    """Train a cartridge. Yields the number of steps so far before each step, and after the last one. A step takes
    `settings.batch` texts, in random order without replacement until all have been taken.
    """
    generator, order = torch.Generator().manual_seed(0), torch.zeros(0, dtype=torch.long)
    parameters = cartridge.parameters()
    adam = torch.optim.Adam(parameters, lr=settings.rate)
    for step in range(settings.steps):
        yield step
        if len(order) < settings.batch:
            order = torch.cat([order, torch.randperm(len(texts), generator=generator)])
        rows, order = order[: settings.batch], order[settings.batch :]
        chosen = [texts[row] for row in rows.tolist()]
        full = logprobs(reader, whole, chosen)
        with torch.enable_grad():
            loss = divergence(full, logprobs(reader, cartridge.context(), chosen))
            gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        adam.step()
    yield settings.steps


def logprobs(reader: Reader, context: Context, texts: Sequence[Conversation]) -> Tensor:
    """Return the log-probs of each token of the answers, given the tokens before it: [n, V], float32 or wider."""
    logits = reader.logits([text.tokens for text in texts], reader.cache(context))
    spans = [slice(len(text.starter) - 1, len(text.tokens) - 1) for text in texts]
    rows = torch.cat([row[span] for row, span in zip(logits, spans, strict=True)])
    return _precise(rows).log_softmax(-1)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divergence(full: Tensor, own: Tensor) -> Tensor:
    """Return KL(full || own) per token, for log-probs [n, V]."""
    return (full.exp() * (full - own)).sum(-1).mean()


def trained(whole: Context, config: PromptCacheConfig, reader: Reader, seconds: Stages) -> Context:
    stages = Stages(seconds)
    with stages.timed("self-study"):
        texts = conversations(whole, config, reader)
    with stages.timed("training"):
        kept = config.kept(len(whole.tokens))
        start = beginning(whole, kept, config.first, config.last)
        cartridge = Cartridge(start, config.first + config.last)
        for _ in train(cartridge, whole, texts, config.cartridge, reader):
            pass
        with torch.no_grad():
            return replace(cartridge.context(), seconds=stages)
