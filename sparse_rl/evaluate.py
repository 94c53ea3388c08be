"""Evaluation: pass@1 over tasks × cache policies × budgets.

    rows = evaluate(load_recipe("my_eval.yaml"))

Every problem is sampled n times. A completion is correct iff its accuracy reward is at least 1; a problem whose reward
is None (its gold answer cannot be read) is left out and counted. pass@k is the unbiased estimator 1 - C(n-c, k)/C(n, k)
(Chen et al. 2021), averaged over problems, with the standard error over problems: samples of one problem are not
independent. All points see the same seed. Each cache has one engine, on which all tasks run.

Writes output_dir/eval.json (recipe, versions, rows) and eval_completions.jsonl (every completion, right or wrong).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.errors import UserError
from sparse_rl.recipe import EvalRecipe
from sparse_rl.samples import engines, eval_policies, facts, sampled, sampling_of

if TYPE_CHECKING:
    from rollout import Rollout
    from sparse_rl.policies import Policy

FORMAT_VERSION = 1


@dataclass(frozen=True)
class EvalRow:
    """One task under one cache.

    accuracy : pass@1 over `problems` problems of `samples` samples; None where no problem could be scored
    standard_error : of accuracy, over problems; None for fewer than two
    pass_at_k, pass_at_k_error : k = 1, 2, 4, ... <= samples -> the same for pass@k
    excluded : problems left out, whose gold answer cannot be read
    retention : cache length / sequence length at the end, over all completions, and over the correct ones
    length, truncated : mean tokens of a completion; share that ran into max_completion_length
    peak_entries : the most entries that a kv head held while decoding; longest_prompt: while prefilling
    """

    task: str
    policy: str
    parameters: dict[str, Any]
    problems: int
    samples: int
    excluded: int
    accuracy: float | None
    standard_error: float | None
    pass_at_k: dict[int, float]
    pass_at_k_error: dict[int, float | None]
    retention: float
    retention_correct: float | None
    length: float
    truncated: float
    peak_entries: int
    longest_prompt: int
    tokens: int
    tokens_per_second: float
    seconds: float

    @property
    def budget(self) -> int | None:
        return self.parameters.get("budget")


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of pass@k from `correct` of n samples: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and its standard error over independent values; None for too few."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def evaluate(recipe: EvalRecipe, model: Any = None, progress: bool = True) -> list[EvalRow]:
    """One row per task and cache point, tasks first; also written to the recipe's output_dir.

    model : a live module to sample from; by default the recipe's model is loaded
    Raises UserError for what the user can mend, before the model is loaded where possible.
    """
    from tqdm import tqdm

    from sparse_rl.data.problems import load_data
    from sparse_rl.engines import settle_engine
    from sparse_rl.models.load import load_config, load_tokenizer
    from trainer.rundir import prepare

    policies = eval_policies(recipe)
    recipe = settle_engine(recipe, load_config(recipe.model) if model is None else None)
    tokenizer = load_tokenizer(recipe.model)
    reward = _accuracy(recipe)
    tasks = {
        name: load_data(
            data,
            tokenizer,
            require=("prompt", "answer") if _needs_answer(recipe) else ("prompt",),
            where=f"tasks.{name}",
        )
        for name, data in recipe.tasks.items()
    }
    sampling = sampling_of(recipe, recipe.samples)
    folder = prepare(recipe)
    opened = engines(recipe, model)
    order = [(task, place) for task in tasks for place in range(len(policies))]
    done: dict[tuple[str, int], EvalRow] = {}
    with (
        (folder / "eval_completions.jsonl").open("w") as log,
        tqdm(total=sum(len(tasks[t]) for t, _ in order), unit="problem", disable=None if progress else True) as bar,
    ):
        for place, policy in enumerate(policies):
            with opened(policy) as engine:
                for task, problems in tasks.items():
                    bar.set_description(f"{task} · {policy.name}{_budget(policy)}")
                    point = _Point(task, policy, recipe.samples)
                    parts = sampled(engine, problems, tokenizer, recipe.tasks[task], sampling)
                    for indices, rollouts, seconds in parts:
                        asked = [problems[i] for i in indices for _ in range(recipe.samples)]
                        texts = tokenizer.batch_decode([r.completion_ids for r in rollouts], skip_special_tokens=True)
                        scores = _score(reward, asked, texts, rollouts)
                        point.add(indices, rollouts, scores, seconds)
                        for line in point.lines(indices, rollouts, texts, scores):
                            log.write(json.dumps(line) + "\n")
                        bar.update(len(indices))
                    done[task, place] = point.row()
                    write_results(folder / "eval.json", recipe, [done[key] for key in order if key in done])
    return [done[key] for key in order]


def write_results(file: Path, recipe: EvalRecipe, rows: Sequence[EvalRow]) -> None:
    """eval.json: {format_version, recipe, versions, seed, correct_if, rows}; written anew after every point."""
    versions = json.loads((file.parent / "environment.json").read_text())
    content = {
        "format_version": FORMAT_VERSION,
        "recipe": recipe.resolved(),
        "versions": versions,
        "seed": recipe.seed,
        "correct_if": "accuracy reward >= 1",
        "rows": [{**dataclasses.asdict(row), "budget": row.budget} for row in rows],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")


# ---- parts ---------------------------------------------------------------------------------------------------------


class _Point:
    """What is gathered of one task under one cache."""

    def __init__(self, task: str, policy: Policy, samples: int) -> None:
        self.task, self.policy, self.samples = task, policy, samples
        self.correct: list[int | None] = []  # per problem; None: left out
        self.kept: list[float] = []
        self.kept_correct: list[float] = []
        self.lengths: list[int] = []
        self.truncated, self.peak, self.longest_prompt, self.seconds = 0, 0, 0, 0.0

    def add(
        self, indices: Sequence[int], rollouts: Sequence[Rollout], scores: Sequence[float | None], seconds: float
    ) -> None:
        for place in range(len(indices)):
            mine = scores[place * self.samples : (place + 1) * self.samples]
            known = [score for score in mine if score is not None]
            self.correct.append(sum(score >= 1 for score in known) if len(known) == len(mine) else None)
        for rollout, score in zip(rollouts, scores, strict=True):
            retention = rollout.trace.retention()
            self.kept.append(retention)
            if score is not None and score >= 1:
                self.kept_correct.append(retention)
            self.lengths.append(len(rollout.completion_ids))
            self.truncated += rollout.finish_reason == "length"
            prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
            self.peak = max(self.peak, self.policy.schedule.most_decoding(prompt, fed))
            self.longest_prompt = max(self.longest_prompt, prompt)
        self.seconds += seconds

    def lines(
        self, indices: Sequence[int], rollouts: Sequence[Rollout], texts: Sequence[str], scores: Sequence[float | None]
    ) -> Iterator[dict[str, Any]]:
        """One line per completion for eval_completions.jsonl."""
        where = {"task": self.task, "policy": self.policy.name, "parameters": self.policy.parameters()}
        for i, (rollout, text, score) in enumerate(zip(rollouts, texts, scores, strict=True)):
            correct = None if score is None else score >= 1
            place = {"problem": indices[i // self.samples], "sample": i % self.samples}
            yield {**where, **place, "correct": correct, "reward": score, **facts(rollout), "completion": text}

    def row(self) -> EvalRow:
        counted = [c for c in self.correct if c is not None]
        ks = [2**i for i in range(self.samples.bit_length())] if counted else []
        at = {k: mean_and_error([pass_at_k(self.samples, c, k) for c in counted]) for k in ks}
        accuracy, error = at.get(1, (None, None))
        tokens = sum(self.lengths)
        return EvalRow(
            task=self.task,
            policy=self.policy.name,
            parameters=self.policy.parameters(),
            problems=len(counted),
            samples=self.samples,
            excluded=len(self.correct) - len(counted),
            accuracy=accuracy,
            standard_error=error,
            pass_at_k={k: mean for k, (mean, _) in at.items() if mean is not None},
            pass_at_k_error={k: se for k, (_, se) in at.items()},
            retention=sum(self.kept) / len(self.kept),
            retention_correct=sum(self.kept_correct) / len(self.kept_correct) if self.kept_correct else None,
            length=tokens / len(self.lengths),
            truncated=self.truncated / len(self.lengths),
            peak_entries=self.peak,
            longest_prompt=self.longest_prompt,
            tokens=tokens,
            tokens_per_second=tokens / max(self.seconds, 1e-9),
            seconds=self.seconds,
        )


def _accuracy(recipe: EvalRecipe) -> Any:
    from rewards import make_rewards

    try:
        return make_rewards([recipe.accuracy])[0][0]
    except ValueError as error:
        raise UserError(str(error), "accuracy") from error


def _needs_answer(recipe: EvalRecipe) -> bool:
    name = recipe.accuracy if isinstance(recipe.accuracy, str) else recipe.accuracy.get("name")
    return name in ("math", "boxed")


def _score(
    reward: Any, problems: Sequence[dict[str, Any]], texts: Sequence[str], rollouts: Sequence[Rollout]
) -> list[float | None]:
    """The accuracy reward of each completion, called as in training."""
    chat = not isinstance(problems[0]["prompt"], str)
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts)
    columns = {name: [p[name] for p in problems] for name in problems[0] if name not in ("prompt", "completion")}
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        scores = reward(
            prompts=[p["prompt"] for p in problems],
            completions=completions,
            completion_ids=[r.completion_ids for r in rollouts],
            trainer_state=None,
            log_metric=lambda *_: None,
            log_extra=lambda *_: None,
            **columns,
        )
        if inspect.isawaitable(scores):
            raise TypeError("it is asynchronous")
        scores = [None if score is None else float(score) for score in scores]
    except Exception as error:  # a function of the user's
        raise UserError(f"{name} raised {type(error).__name__}: {error}", "accuracy") from error
    if len(scores) != len(texts):
        raise UserError(f"{name} returned {len(scores)} values for {len(texts)} completions", "accuracy")
    return scores


def _budget(policy: Policy) -> str:
    budget = policy.parameters().get("budget")
    return "" if budget is None else f" {budget}"
