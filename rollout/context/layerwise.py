"""On-policy reference queries (Attention Matching, section 3.1 and appendix C.4): the queries of a layer are taken
while the layers below it are already compacted.

The paper runs the model up to a layer, compacts the layer, and goes on to the next. One forward pass does the same,
because attention is called layer after layer: in each layer it first takes the queries, compacts the layer with them,
and then attends to the compacted entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollout.context.cache import LayerEntries, attention
from sparse_rl.attention.windows.cache import WindowCache


class LayerwiseView:
    """The `kv_view` of one forward pass over texts that continue a context, and compact it layer by layer.

    All texts are packed into one row. Each text begins at the position after the context, and sees the compacted
    entries and its own tokens, but no other text. A layer needs the queries of all tokens before it is compacted, so
    the texts are not read in pieces.

    past : number of tokens of the whole context
    texts : the texts of each kind of reference queries, as token ids
    compact : function (layer, reference queries [1, Hkv, number of queries, D]) -> the entries of the compacted layer;
        layers with a sliding window are not counted
    of_windows : the context's tokens in the layers with a sliding window, which stay as they are

    After the pass, `layers` has the entries of all compacted layers.
    """

    def __init__(
        self,
        past: int,
        texts: Sequence[Sequence[list[int]]],
        compact: Callable[[int, Tensor], LayerEntries],
        of_windows: WindowCache | None = None,
    ) -> None:
        self.past, self.texts, self.compact, self.of_windows = past, texts, compact, of_windows
        self.layers: list[LayerEntries] = []
        flat = [text for kind in texts for text in kind]
        self.ids = [token for tokens in flat for token in tokens]
        self.positions = [past + place for tokens in flat for place in range(len(tokens))]
        self._lengths = [len(tokens) for tokens in flat]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compact the layer with the texts' queries, and return their attention to the compacted entries.

        query : [1, Hq, T, D], after RoPE, for T tokens of all texts
        key, value : [1, Hkv, T, D], keys after RoPE
        scaling : the factor on q . k

        Returns the attention output, [1, Hq, T, D].
        """
        queries, keys, values = (x.split(self._lengths, dim=2) for x in (query, key.to(value.dtype), value))
        if self.of_windows is not None and self.of_windows.sizes[layer]:
            of_windows, start = self.of_windows, torch.tensor([self.past], device=key.device)
            of_texts = zip(queries, keys, values, strict=True)
            return torch.cat([of_windows.after(layer, q, k, v, scaling, start) for q, k, v in of_texts], dim=2)
        remaining, kinds = iter(queries), []
        for texts in self.texts:
            kinds.append(by_kv_head(torch.cat([next(remaining) for _ in texts], dim=2), key))
        self.layers.append(self.compact(len(self.layers), torch.cat(kinds, dim=2)))
        outs = []
        for q, k, v in zip(queries, keys, values, strict=True):
            at = torch.arange(q.shape[2], device=q.device)[None]
            outs.append(attention(q, k, v, at, self.layers[-1], scaling))
        return torch.cat(outs, dim=2)


def by_kv_head(query: Tensor, keys: Tensor) -> Tensor:
    """Group the queries of T tokens by kv head: [1, Hq, T, D] -> [1, Hkv, G x T, D], for G query heads per kv head.

    keys : [1, Hkv, any number of entries, D]
    """
    return query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
