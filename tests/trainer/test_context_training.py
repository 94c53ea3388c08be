"""GRPO and distillation after compacted contexts: replay and resume are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import SAMPLED, small, steps

from sparse_rl.commands.train import train
from sparse_rl.recipe import make_recipe

DOCUMENTS = ("1234567890123456", "Q12;Q34;Q5", "999888777666555444333")
PROMPT_CACHE = {"ratio": 0.3, "first": 1}
KEYS = {"cache": "full", "prompt_cache": PROMPT_CACHE}


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    """recipe(kind, **keys) returns a recipe with four questions about each of three documents."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = [
        {"document": text, "prompt": f"Q{digit}Q", "completion": f"{digit}1{digit}"}
        for text in DOCUMENTS
        for digit in "0123"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "document"}}

    def make(kind: str, **keys: Any) -> Any:
        content = small(str(tiny()), tmp_path / "run", data=data, gradient_checkpointing=True)
        return make_recipe({**content, **SAMPLED[kind], **KEYS, **keys})

    return make


@pytest.mark.parametrize("kind", SAMPLED)
def test_it_runs(kind, recipe, tmp_path):
    train(recipe(kind))
    for line in steps(tmp_path / "run"):
        print(line)
