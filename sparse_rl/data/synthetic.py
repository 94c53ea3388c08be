"""Helpers of the synthetic tasks: splits that never share a problem, small word tokenizers, and small models.

A hash of a problem's numbers assigns it to one of three splits, so held-out problems are the same under every seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sparse_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

Problem = tuple[int, ...]

PAD_ID, EOS_ID = 0, 1
SPLITS = {"train": range(8), "calibration": range(8, 9), "evaluation": range(9, 10)}  # hash mod 10


def split_of(problem: Problem) -> str:
    digest = hashlib.blake2b(bytes(problem), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 10
    return next(name for name, buckets in SPLITS.items() if bucket in buckets)


def drawn(task: str, split: str, seed: int, draw: Callable[[random.Random], Problem]) -> Iterator[Problem | None]:
    """Yield problems endlessly, with None in place of a problem of another split. Two seeds may share problems."""
    if split not in SPLITS:
        raise UserError(f"{task.replace('-', ' ')}: unknown split {split!r}; one of {', '.join(SPLITS)}")
    rng = random.Random(f"{task}/{split}/{seed}")
    while True:
        problem = draw(rng)
        yield problem if split_of(problem) == split else None


def word_tokenizer(
    words: Sequence[str], size: int, splitter: Any, longest: int, decoder: Any = None
) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per word, without a chat template, that pads on the left.

    words : vocabulary, which includes <pad>, <eos> and <unk>; it is padded to `size` tokens
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    every = [*words, *(f"<unused{i}>" for i in range(size - len(words)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(every)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = splitter
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=longest,
    )


def small_config(
    vocabulary: int,
    longest: int,
    rope_theta: float,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,  # the minimum of vLLM's CPU attention
    intermediate: int = 128,
    **further: Any,
) -> Qwen3Config:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
        **further,
    )
