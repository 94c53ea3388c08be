"""The counts of a word cloud equal those of a loop over tokens, and no two words overlap."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch
from test_heads import random_trace

from sparse_rl.analysis.cloud import cloud, draw_cloud, placed
from sparse_rl.errors import UserError
from sparse_rl.trace import NEVER, EvictionTrace

TEXTS = ["Wait", " Wait", "wait", " ", "\n\n", "", "\ufffd", "\ufffd\ufffd", "$x$", "a b", "7", "."]


def strings(ids: Sequence[int]) -> list[str]:
    return [TEXTS[token] for token in ids]


def sequences(lengths: Sequence[int]) -> list[tuple[list[int], EvictionTrace]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [
        (torch.randint(0, len(TEXTS), (length,), generator=generator).tolist(), random_trace(length, length))
        for length in lengths
    ]


@pytest.mark.parametrize(("layer", "head"), [(None, None), (0, 1), (2, 0)])
def test_counts_equal_a_loop_over_the_tokens(layer: int | None, head: int | None) -> None:
    """Each fed token of each sequence counts once. Spaces around a text are stripped; blank tokens are apart."""
    pairs = sequences([5, 40, 21])
    numbers = cloud(iter(pairs), strings, {}, layer, head)
    kept, total = Counter[str](), Counter[str]()
    for ids, trace in pairs:
        for place in range(len(ids) - 1):
            text = TEXTS[ids[place]].strip()
            text = "\ufffd" if text == "\ufffd\ufffd" else text
            total[text] += 1
            kept[text] += int(trace.evict_at[2 if layer is None else layer, head or 0, place]) >= len(ids) - 1
    assert numbers.pop("blank") == [kept.pop(""), total.pop("")]
    assert numbers.pop("incomplete") == [kept.pop("\ufffd"), total.pop("\ufffd")]
    assert {row["token"]: (row["kept"], row["total"]) for row in numbers["tokens"]} == {
        text: (kept[text], total[text]) for text in total
    }
    counts = [row["kept"] for row in numbers["tokens"]]
    assert counts == sorted(counts, reverse=True)
    assert numbers["sequences"] == 3


def test_forms_of_a_word_with_and_without_a_space_are_one() -> None:
    """Known by hand: of "Wait", " Wait", "wait" and "7" the head evicts the third; the last token is never fed."""
    evict_at = torch.full((1, 1, 5), NEVER)
    evict_at[0, 0, 2] = 3
    numbers = cloud([([0, 1, 2, 10, 11], EvictionTrace.recorded(evict_at))], strings, {})
    assert numbers["tokens"] == [
        {"token": "Wait", "kept": 2, "total": 2},
        {"token": "7", "kept": 1, "total": 1},
        {"token": "wait", "kept": 0, "total": 1},
    ]
    assert numbers["blank"] == numbers["incomplete"] == [0, 0]


def test_a_head_that_holds_only_blank_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="kv head 0 of layer 1 holds no token with a text"):
        cloud([([3, 4, 5, 6], EvictionTrace.dense(2, 1, 4))], strings, {})


def test_words_do_not_overlap_and_stay_near_the_centre() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(float(w) * 9 + 1, float(h) * 3 + 1) for w, h in torch.rand(60, 2, generator=generator)]
    boxes = placed(sizes)
    for box, size in zip(boxes, sizes, strict=True):
        assert (box[2] - box[0], box[3] - box[1]) == pytest.approx(size)
    for one, other in combinations(boxes, 2):
        apart_in_width = one[2] <= other[0] or other[2] <= one[0]
        apart_in_height = one[3] <= other[1] or other[3] <= one[1]
        assert apart_in_width or apart_in_height
    area = sum(width * height for width, height in sizes)
    extent = [max(box[2] for box in boxes) - min(box[0] for box in boxes), max(b[3] for b in boxes) * 2]
    assert extent[0] * extent[1] < 4 * area
    assert placed(sizes) == boxes


def test_the_same_numbers_give_the_same_picture(tmp_path: Path) -> None:
    numbers = json.loads(json.dumps(cloud(sequences([80, 60]), strings, {"model": "a"})))
    for name in ("one.png", "two.png"):
        draw_cloud(numbers, tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
