"""Training after compacted contexts: replay, gradients and resume are exact, and what cannot be replayed is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_matched import dense_logprobs
from judging import gradients, trainer_gap
from tiny import QUICKSTART, model_of, prompts_of
from trainer_runs import GRPO_KEYS, SAMPLED, check_resumed, small, steps

from rollout import SamplingConfig
from rollout.context import PromptCacheConfig
from rollout.context.engine import CompactingEngine
from rollout.context.reader import ContextPrompts
from rollout.hf import HFEngine
from sparse_rl.commands.train import train
from sparse_rl.data.tokens import SplitPrompt
from sparse_rl.errors import UserError
from sparse_rl.metrics import read_metrics
from sparse_rl.models.directory import model_directory
from sparse_rl.models.load import base_of
from sparse_rl.policies import make_policy
from sparse_rl.recipe import make_recipe
from trainer.batch import Example
from trainer.distill import DistillArguments, DistillTrainer

DOCUMENTS = ("1234012340123402", "Q1234;Q1;Q4321;", "333222111000333222111000333222111")
PROMPT_CACHE = {"ratio": 0.3, "first": 1}
CONFIG = PromptCacheConfig(**PROMPT_CACHE, queries=["context"])


@pytest.fixture
def recipe(tiny, tmp_path, monkeypatch):
    """recipe(kind, family="qwen3", **keys) returns a recipe with four questions about each of three documents."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = [
        {"document": text, "prompt": f"{digit}Q{digit}2", "completion": f"{digit}1{digit}"}
        for digit in "0123"
        for text in DOCUMENTS
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"path": str(tmp_path / "rows.jsonl"), "columns": {"context": "document"}}
    keys = {"cache": "full", "prompt_cache": PROMPT_CACHE, "gradient_checkpointing": True}

    def make(kind: str, family: str = "qwen3", **further: Any) -> Any:
        return make_recipe({**small(tiny(family), tmp_path / "run", data=data), **SAMPLED[kind], **keys, **further})

    return make


# ---- exactness ------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "trained weights": {"model": str(QUICKSTART), "prompt_cache": {**PROMPT_CACHE, "select": "omp"}},
    "attention": {},
    "window": {"prompt_cache": {"ratio": 0.3, "queries": ["window"], "window": 5, "last": 2}},
    "parts, updates": {"prompt_cache": {"ratio": 0.3, "chunk": 7}, "gradient_accumulation_steps": 2},
    "evict": {"prompt_cache": {"policy": "evict", "queries": ["repeat"], "ratio": 0.4}},
    "none": {"prompt_cache": {"policy": "none", "first": 2}},
    "lora": {"lora": {"r": 4}},
    "sliding windows": {"family": "gemma3_text"},
    "truncated draws": {"top_p": 0.8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.few(2)
def test_every_step_of_grpo_replays_exactly(case, recipe, tmp_path):
    """Control: a trainer that attends to the whole context."""
    keys = {"max_steps": 2, **CASES[case]}
    train(recipe("grpo", **keys))
    lines = steps(tmp_path / "run")
    assert len(lines) == 2
    assert all(line["replay/gap_max"] <= 1e-5 and line["cache/retention"] < 0.9 for line in lines)
    supports = [line["support/gap_max"] for line in lines if "support/gap_max" in line]
    assert len(supports) == 2 * (case == "truncated draws")
    assert all(gap <= 1e-5 for gap in supports)
    if case in ("trained weights", "window", "none"):
        train(recipe("grpo", **keys, train_attention="full", output_dir=str(tmp_path / "control")))
        assert steps(tmp_path / "control")[0]["replay/gap_max"] >= 0.1


@pytest.mark.slow
@pytest.mark.parametrize("completions", ["data", "student"])
def test_every_step_of_distillation_replays_exactly(completions, recipe, tmp_path, monkeypatch):
    """The gap of a step is measured with the weights that compacted the contexts. Control: a full cache."""
    gaps, controls = list[float](), list[float]()
    of_trainer = DistillTrainer._with_traces

    def measured(self: Any, examples: Any) -> Any:
        made, engine = of_trainer(self, examples), self.engine
        for before, example in zip(examples, made, strict=True):
            split = before.split
            context = engine.compact(split.context, CONFIG)
            (rollout,) = engine.simulate([split.rest], [example.completion], context=context)
            assert rollout.trace.sections.keys() == example.trace.sections.keys()
            rollout.trace = example.trace
            gaps.append(trainer_gap(base_of(engine.model), [rollout]))
            rollout.trace = example.trace.dense_like()
            controls.append(trainer_gap(base_of(engine.model), [rollout]))
        return made

    monkeypatch.setattr(DistillTrainer, "_with_traces", measured)
    keys = {"completions": completions, "max_completion_length": 8, "refresh_every": 2 * (completions == "data")}
    train(recipe("distill", **keys, save_steps=2))
    assert len(gaps) == 20  # the second batch has four rows
    assert max(gaps) <= 1e-5
    assert min(controls) > 1e-3
    assert max(controls) >= 0.1


def test_a_context_is_compacted_once_for_all_its_prompts(monkeypatch):
    """Also if its prompts stand apart. Sampling equals `generate` after the context; control: another seed."""
    model, (first, second, *questions) = model_of("qwen3"), prompts_of("qwen3", [40, 31, 5, 2, 7])
    engine = CompactingEngine(model, make_policy("full"), prompt_cache=CONFIG, about=ContextPrompts())
    studied, of_engine = list[int](), HFEngine.study
    monkeypatch.setattr(HFEngine, "study", lambda self, ids, *a: studied.append(len(ids)) or of_engine(self, ids, *a))
    contexts = (first, second, first)
    prompts = [SplitPrompt(context, 0, rest) for context, rest in zip(contexts, questions, strict=True)]
    rollouts = engine.continued(prompts, sampling := SamplingConfig(6, n=2, seed=5, ignore_eos=True))
    assert studied == [40, 31]
    assert [r.prompt_ids for r in rollouts] == [
        [*c, *q] for c, q in zip(contexts, questions, strict=True) for _ in "12"
    ]
    assert trainer_gap(model, rollouts) <= 1e-5
    alone = engine.continued(prompts[2:], sampling)
    assert [r.completion_ids for r in alone] == [r.completion_ids for r in rollouts[4:]]
    other = engine.continued(prompts[2:], SamplingConfig(6, n=2, seed=6, ignore_eos=True))
    assert [r.completion_ids for r in other] != [r.completion_ids for r in alone]
    traces = engine.traces(prompts[:2], [len(r.trace) for r in rollouts[:4:2]])
    assert all(
        torch.equal(ours.sections[name], values)
        for ours, rollout in zip(traces, rollouts[:4:2], strict=True)
        for name, values in rollout.trace.sections.items()
    )


def test_gradients_of_distillation_flow_through_the_fits(new_model, tmp_path):
    """The cross-entropy and its gradients equal those of the dense reference. Control: constant fits."""
    student = new_model("qwen3")
    texts = zip(prompts_of("qwen3", [40, 31]), prompts_of("qwen3", [5, 2]), prompts_of("qwen3", [9, 14]), strict=True)
    rows = [Example([*context, *rest], answer, context=len(context)) for context, rest, answer in texts]
    own = {"prompt_cache": CONFIG, "about": ContextPrompts()}
    engine = CompactingEngine(copy.deepcopy(student), make_policy("full"), **own)
    settings = {"use_cpu": True, "report_to": [], "gradient_checkpointing": True, "disable_tqdm": True}
    args = DistillArguments(output_dir=str(tmp_path), kl_weight=0.0, ce_weight=1.0, bf16=False, **settings)
    trainer = DistillTrainer(student, args, rows, teacher=new_model("llama", seed=5), engine=engine)
    traced = trainer._with_traces(rows)
    model = trainer.model.train()
    value = trainer.compute_loss(model, traced)
    ours = gradients(model, value)
    dense = torch.cat([dense_logprobs(model, e.prompt, e.completion, e.trace) for e in traced])
    assert float(value.detach()) == pytest.approx(-float(dense.mean()), abs=1e-5)
    model.zero_grad()
    theirs = gradients(model, -dense.mean())
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    model.zero_grad()
    trainer.args.match_gradient = "constant"
    assert (gradients(model, trainer.compute_loss(model, traced)) - theirs).norm() > 1e-2 * theirs.norm()


# ---- resume, validation, evaluation ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLED)
def test_a_resumed_run_equals_an_uninterrupted_run(kind, recipe, tmp_path):
    """GRPO is resumed in the middle of a buffer of traces."""
    own = GRPO_KEYS if kind == "grpo" else {"completions": "student", "max_completion_length": 8}
    check_resumed(lambda **keys: recipe(kind, **own, **keys), tmp_path, at=2)


@pytest.mark.slow
def test_a_model_is_validated_and_evaluated_after_compacted_contexts(recipe, tmp_path):
    from sparse_rl.commands.eval import evaluate, load_evaluation

    made = recipe("grpo")
    data = made.resolved()["data"]
    validation = {"data": data, "every": 2, "problems": 4, "samples": 2}
    train(recipe("grpo", validation=validation, max_steps=2))
    (line,) = [line for line in read_metrics(tmp_path / "run") if "eval_reward" in line]
    assert line["eval_replay/gap_max"] <= 1e-5
    assert line["eval_cache/retention"] < 0.9
    evaluation = load_evaluation(str(tmp_path / "run"), ["rollout.engine=hf"])
    (row,) = evaluate(evaluation.with_models(model_directory))
    assert row.policy == "am"
    assert row.parameters["ratio"] == 0.3


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "repeat": (
        {"prompt_cache": {"queries": ["context", "repeat"]}},
        r"prompt_cache\.queries: a trace cannot record queries of repeat.* use \[context\], \[window\] or both",
    ),
    "cartridge": ({"prompt_cache": {"policy": "cartridge"}}, r"prompt_cache\.policy: .*cartridge; use am, evict, full"),
    "summary": ({"prompt_cache": {"summary": "plain"}}, r"prompt_cache\.summary: .*remove it"),
    "read alone": ({"prompt_cache": {"chunking": "text"}}, r"prompt_cache\.chunking: .*use chunking: kv"),
    "paper": ({"prompt_cache": {"fit": "paper"}}, r"prompt_cache\.fit: .*use fit: ridge"),
    "list": ({"prompt_cache": {"ratio": [0.1, 0.2]}}, r"prompt_cache\.ratio: "),
    "cache": ({"cache": {"policy": "streaming", "budget": 9}}, "cache: nothing is evicted after a context"),
    "vllm": ({"rollout": {"engine": "vllm"}}, r"rollout\.engine: only hf compacts contexts"),
    "no context": (
        {"data": {"synthetic": {"task": "running_sum", "size": 24}}},
        r"data\.columns: prompt_cache compacts contexts; say which column holds them",
    ),
}


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_recipes_that_cannot_be_trained_are_refused(keys, message, recipe):
    """Control: the recipe without these keys, whose engine is hf also if it is not named."""
    assert recipe("grpo", rollout={}).rollout.engine == "hf"
    for kind in SAMPLED:
        with pytest.raises(UserError, match=message):
            recipe(kind, **keys)


def test_fitted_contexts_are_not_packed(recipe):
    with pytest.raises(UserError, match="packing: sequences after contexts with fitted entries cannot be packed"):
        recipe("distill", packing=True)
    recipe("distill", packing=True, prompt_cache={"policy": "evict"})


def test_experts_are_refused_before_the_model_is_loaded(recipe):
    with pytest.raises(UserError, match="prompt_cache: the experts that read a compacted context are not recorded"):
        recipe("grpo", family="qwen3_moe").prepare_training()
