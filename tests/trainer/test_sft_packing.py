"""Packing in sft follows TRL: `packing: true` keeps documents apart; `packing_strategy: wrapped` joins them."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from eager import eager_copy
from transformers import AutoModelForCausalLM

from sparse_rl.attention.interface import adopt
from sparse_rl.data.problems import load_data
from sparse_rl.data.synthetic import EOS_ID
from sparse_rl.models.load import load_tokenizer
from sparse_rl.recipe import make_recipe
from trainer.arguments import model_options
from trainer.sft import make_trainer


@pytest.fixture
def packed(tiny, tmp_path):
    """packed(strategy, family="qwen3") returns the model and the first batch of its trainer."""

    def make(strategy: str, family: str = "qwen3") -> tuple[Any, dict[str, Any]]:
        content = {
            "kind": "sft", "model": tiny(family), "output_dir": str(tmp_path), "dtype": "float32", "max_length": 160,
            "data": {"synthetic": {"task": "running_sum", "size": 24, "n": 4}}, "per_device_train_batch_size": 2,
            "gradient_checkpointing": False, "packing": True, "packing_strategy": strategy,
        }  # fmt: skip
        recipe: Any = make_recipe(content)
        tokenizer = load_tokenizer(recipe.model)
        data = load_data(recipe.data, tokenizer, require=("prompt", "completion"))
        options = {"model_init_kwargs": model_options("float32"), **recipe.training_arguments()}
        trainer = make_trainer(recipe.model, recipe.sft, options, tokenizer, data, None, [])
        return trainer.model.eval(), next(iter(trainer.get_train_dataloader()))

    return make


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo3"])
@pytest.mark.parametrize("adopted", [False, True], ids=["", "our attention"])
def test_documents_do_not_see_each_other(packed, family, adopted):
    """Also after the model was switched to our attention, as `stop_at_accuracy` does."""
    model, batch = packed("bfd", family)
    config, weights = copy.deepcopy(model.config), model.state_dict()
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()  # a copy keeps the forward
    eager.load_state_dict(weights)
    if adopted:
        adopt(model)
    ids, positions = batch["input_ids"], batch["position_ids"]
    assert ids.shape[0] == 1
    assert int((positions == 0).sum()) >= 4
    starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions, attention_mask=None).logits[0]
        for start, end in pairwise(starts):
            alone = eager(input_ids=ids[:, start:end]).logits[0]
            torch.testing.assert_close(together[start:end], alone, rtol=1e-4, atol=1e-4)
        whole = model(input_ids=ids).logits[0]
        if family != "qwen3":
            eager.config.sliding_window = 1000
            wider = eager(input_ids=ids[:, : starts[1]]).logits[0]
            assert float((wider - together[: starts[1]]).abs().max()) > 1e-2  # windows are shorter than the document
    assert float((whole - together).abs().max()) > 1e-2  # the control


def test_wrapped_documents_see_each_other(packed):
    _, batch = packed("wrapped")
    assert batch["input_ids"].shape == (2, 160)
    assert "position_ids" not in batch
    mask, ends = batch["attention_mask"].long(), batch["input_ids"] == EOS_ID
    assert int((ends & (mask > 0)).sum(1).max()) >= 3
    assert bool((mask.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_padded_rows_keep_their_sliding_windows(family, new_model):
    model = new_model(family)
    eager, ids = eager_copy(model), torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    lengths = (40, 9, 23)
    mask = torch.stack([torch.arange(40) < length for length in lengths]).long()
    with torch.no_grad():
        logits = adopt(model)(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, length in enumerate(lengths):
            alone = eager(input_ids=ids[row : row + 1, :length], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, :length], alone, rtol=1e-5, atol=1e-5)
        eager.config.sliding_window = 99
        wider = eager(input_ids=ids[:1], use_cache=False).logits[0]
    assert float((wider - logits[0]).abs().max()) > 1e-2  # control
