"""Fixtures of the recipe tests: tiny models and small files in place of the models and datasets on the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from small_recipes import SHIPPED, family_of

from sparse_rl.recipe import BenchRecipe, BudgetsRecipe, EvalRecipe, PerplexityRecipe, TaughtRecipe, load_recipe
from sparse_rl.recipe.run import TrainRecipe

CHAT = (
    "{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' if enable_thinking is not defined or enable_thinking else '>;' }}{% endif %}"
)
WINDOW = 2**18  # of the tiny models, in tokens: the longest that a recipe needs


@pytest.fixture(scope="session")
def tiny_model(new_model, tmp_path_factory):
    """tiny_model(family, chat) returns the directory of a tiny random model; with chat True, its tokenizer has a chat
    template."""
    from transformers import GenerationConfig

    from sparse_rl.data.synthetic import EOS_ID, PAD_ID, RunningSum

    folders: dict[tuple[str, bool], str] = {}

    def make(family: str, chat: bool) -> str:
        if (family, chat) not in folders:
            folder = tmp_path_factory.mktemp(f"{family}-{chat}")
            ids = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "bos_token_id": None}
            model = new_model(family, initializer_range=0.2, max_position_embeddings=WINDOW, **ids)
            model.generation_config = GenerationConfig(eos_token_id=[EOS_ID, 40, 41, 42], pad_token_id=PAD_ID)
            model.save_pretrained(folder)
            tokenizer = RunningSum.tokenizer()
            tokenizer.chat_template = CHAT if chat else None
            tokenizer.save_pretrained(folder)
            folders[family, chat] = str(folder)
        return folders[family, chat]

    return make


def tests_of(a: int, b: int, data: Any) -> dict[str, Any]:
    tests = json.dumps([{"input": f"{a} {b}", "output": str(a + b), "testtype": "stdin"}])
    columns = {"public_test_cases": tests, "private_test_cases": tests, "metadata": "{}"}
    columns |= {
        data.columns[name]: value for name, value in (("tests", tests), ("starter_code", "")) if name in data.columns
    }
    return columns


@pytest.fixture
def problems_for(tmp_path):
    """problems_for(data) returns a local file with the columns that a data block reads."""

    def make(data: Any) -> str:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        question, answer = data.columns.get("prompt", "prompt"), data.columns.get("answer", "answer")
        marker = f"so {data.answer_after} " if data.answer_after else ""
        completion, context = data.columns.get("completion", "completion"), data.columns.get("context", "context")
        pairs = [(a, b) for a in range(8) for b in range(5)]
        rows = [
            {
                question: f"{a}+{b}=",
                answer: f"{marker}{a + b}",
                "answers": [str(a + b)],
                context: "1+2=3;" * 4,
                completion: f"{a}+{b} makes it \\boxed{{{a + b}}}",
            }
            | {option: str(a + b + wrong) for wrong, option in enumerate(data.choices or ())}
            | tests_of(a, b, data)
            | {column: (c if isinstance(c, str) else next(iter(c.values()))) for column, c in data.where.items()}
            for a, b in pairs
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return make


@pytest.fixture
def stand_ins(tiny_model, problems_for, tmp_path):
    """stand_ins(name, overrides, chat) returns further overrides of a recipe, which replace its models by tiny models,
    with a chat template if `chat` is true, and its datasets and texts by small local files.
    """

    def local(key: str, data: Any) -> list[str]:
        if data.synthetic is not None:
            return []
        places = {"path": problems_for(data), "split": "train", "subset": None, "columns": data.columns}
        places |= {"files": None, "release": None}
        return [f"{key}.{name}={json.dumps(value)}" for name, value in places.items()]

    def make(name: str, overrides: Sequence[str] = (), chat: bool = True) -> list[str]:
        recipe: Any = load_recipe(name, overrides)
        model = SHIPPED.get(recipe.model) or tiny_model(family_of(recipe.model), chat)
        replaced = [f"model={model}", f"output_dir={tmp_path / 'out'}"]
        if isinstance(recipe, EvalRecipe | PerplexityRecipe) and recipe.sweep.model:
            replaced.append(f"sweep.model=[{model}]")
        if isinstance(recipe, EvalRecipe | BudgetsRecipe):
            for task, data in recipe.tasks.items():
                replaced += local(f"tasks.{task}", data)
            if any(cache.budgets for cache in recipe.prompt_caches()):
                layers = [1] if family_of(recipe.model) == "gemma3_text" else [0, 1]  # of the tiny model
                shares = {f"L{layer}H{head}": 1.0 for layer in layers for head in range(2)}
                (tmp_path / "budgets.json").write_text(json.dumps(shares))
                blocks = recipe.resolved()["prompt_cache"]
                ours = {"budgets": str(tmp_path / "budgets.json")}
                own = [block | (ours if block["budgets"] else {}) for block in blocks]
                replaced.append(f"prompt_cache={json.dumps(own)}")
        if isinstance(recipe, BudgetsRecipe):
            replaced.append("contexts=1")  # the files have one context
        if isinstance(recipe, BenchRecipe):
            replaced += ["random_weights=true", "shape={max_position_embeddings: 200000}"]
        if isinstance(recipe, PerplexityRecipe):
            (tmp_path / "book.txt").write_text("Qa1b2c3?a1A1;" * 2000)
            replaced.append(f"text={tmp_path / 'book.txt'}")
        if isinstance(recipe, TrainRecipe):
            replaced += local("data", recipe.data)
            replaced += [] if recipe.validation is None else local("validation.data", recipe.validation.data)
            replaced += ["launch={processes: 1, zero_stage: 0}", "report_to=[]"]
        if isinstance(recipe, TaughtRecipe) and recipe.taught_by.teacher is not None:
            replaced.append(f"teacher={model}")
        return replaced

    return make
