"""`adopt` registers our attention in a transformers model. Without a `kv_view`, the model then computes plain
attention, with padding and caches. `adopt` refuses unsupported models.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import new_model
from traces import trace_of
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from sparse_rl.attention.families import FAMILIES, cache_shape
from sparse_rl.attention.interface import ATTENTION, NO_MASK, adopt
from sparse_rl.attention.views import make_view

LENGTHS = (5, 12, 1, 9)
WIDTH = max(LENGTHS)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return left-padded token ids and their attention mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (len(LENGTHS), WIDTH), generator=generator)
    return ids, (torch.arange(WIDTH) >= WIDTH - torch.tensor(LENGTHS)[:, None]).long()


@pytest.mark.parametrize("theirs", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, theirs: str) -> None:
    """Left-padded with a mask, and without padding. Control: without the mask, padding changes them."""
    ids, mask = batch()
    plain = new_model(family)
    plain.set_attn_implementation(theirs)
    ours = adopt(copy.deepcopy(plain))
    assert ours.config._attn_implementation == ATTENTION
    assert plain.config._attn_implementation == theirs
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    real = mask.bool()
    with torch.no_grad():
        actual, expected = (
            m(input_ids=ids, attention_mask=mask, position_ids=positions).logits[real] for m in (ours, plain)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
        assert (ours(input_ids=ids, position_ids=positions).logits[real] - expected).abs().max() > 1e-2  # control
        torch.testing.assert_close(ours(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(6)
def test_generate_ignores_padding(family: str) -> None:
    """It gives the tokens of each prompt alone, and of transformers. Control: without the mask."""
    ids, mask = batch()
    plain = new_model(family)
    plain.set_attn_implementation("eager")
    ours = adopt(copy.deepcopy(plain))
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    padded = ours.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(padded, plain.generate(ids, attention_mask=mask, **settings))
    for row, n in enumerate(LENGTHS):
        own = slice(row, row + 1), slice(WIDTH - n, None)
        alone = ours.generate(ids[own], attention_mask=mask[own], **settings)
        assert torch.equal(alone[0, n:], padded[row, WIDTH:])
    without_mask = ours.generate(ids, attention_mask=torch.ones_like(mask), **settings)
    assert not torch.equal(without_mask, padded)  # control


def test_chunks_with_a_cache_equal_one_forward_pass() -> None:
    """Control: a chunk that is fed without the cache."""
    ids, _ = batch()
    model = adopt(new_model("qwen3"))
    with torch.no_grad():
        at_once = model(input_ids=ids).logits
        cache, parts = None, []
        for chunk in ids.split([4, 5, 1, 2], dim=1):
            out = model(input_ids=chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        torch.testing.assert_close(torch.cat(parts, dim=1), at_once, rtol=0, atol=1e-5)
        alone = model(input_ids=ids[:, 4:9]).logits
    assert (alone - parts[1]).abs().max() > 1e-2  # control


def test_an_encoder_that_a_trainer_loads_with_our_attention_sees_both_ways() -> None:
    """As a reward model does, with padding and without. Control: a causal encoder."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=2, initializer_range=0.5)).eval()
    ids, mask = batch()
    scores = {}
    for name in ("eager", ATTENTION):
        model.set_attn_implementation(name)
        with torch.no_grad():
            scores[name] = torch.cat([model(ids, attention_mask=mask.flip(1)).logits, model(ids).logits])
    torch.testing.assert_close(scores[ATTENTION], scores["eager"], rtol=0, atol=1e-5)
    for layer in model.bert.encoder.layer:
        layer.attention.self.is_causal = True
    with torch.no_grad():
        assert (model(ids).logits - scores["eager"][len(ids) :]).abs().max() > 1e-2


def test_adopting_twice_equals_adopting_once() -> None:
    model = new_model("qwen3")
    assert adopt(model) is model
    assert adopt(model) is model
    assert model.config._attn_implementation == ATTENTION


def test_cache_shape_is_layers_kv_heads_and_head_dim() -> None:
    """If the configuration has no head_dim, the head dim is hidden_size / number of query heads."""
    assert cache_shape(new_model("qwen3", num_hidden_layers=5, head_dim=16).config) == (5, 2, 16)
    config = new_model("qwen2").config
    del config.head_dim
    assert cache_shape(config) == (2, 2, 8)


def small(**settings: object) -> Qwen2ForCausalLM:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "of type 'gpt2', which cannot be replayed: the supported families are qwen2, qwen3, llama"),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
            "all its layers have a sliding window, so no layer is left for a cache policy",
        ),
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1, and random changes cannot be replayed"),
    ],
    ids=["family", "sliding window", "dropout"],
)
def test_unsupported_models_are_refused_by_adopt(settings: dict | None, message: str) -> None:
    """In one line that leaves the model unchanged. Control: a plain Qwen2 model of the same sizes."""
    gpt2 = GPT2Config(vocab_size=8, n_embd=8, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(gpt2) if settings is None else small(**settings)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message) as refusal:
        adopt(model)
    assert "\n" not in str(refusal.value)
    assert model.config._attn_implementation == before
    adopt(small())  # control


def test_dropout_at_run_time_is_refused() -> None:
    """A dropout rate that is set after `adopt` is refused in the forward pass."""
    model = adopt(new_model("qwen3", num_hidden_layers=1)).train()
    view = make_view([trace_of(6, layers=1)], [0], 6, "cpu")
    ids = torch.arange(3, 9)[None]
    model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="cannot be replayed"):
        model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False)
