"""Evaluation: pass@1 over tasks × cache policies.

Every problem is sampled n times. A completion is correct iff its score is at least 1; a problem with a sample that has
no score (its gold answer cannot be read) is left out and counted. pass@k is averaged over problems, with the standard
error over problems: samples of one problem are not independent. All points see the same seed. Each policy has one
engine, on which all tasks run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from rollout.config import SamplingConfig
from rollout.engine import Engine, Rollout
from rollout.evaluation.estimators import mean_and_error, pass_at_k
from rollout.evaluation.samples import sample_in_parts, summary
from sparse_rl.policies.base import Policy


@dataclass(frozen=True)
class Task:
    """Problems, and what scores their completions.

    prompts : token ids, one list per problem
    score : (problem of each completion, its text, its rollout) -> its score, None where there is none
    """

    prompts: Sequence[Sequence[int]]
    score: Callable[[list[int], list[str], list[Rollout]], list[float | None]]


@dataclass(frozen=True)
class EvalRow:
    """One task under one cache.

    accuracy : pass@1 over `problems` problems of `samples` samples; None where no problem could be scored
    standard_error : of accuracy, over problems; None for fewer than two
    pass_at_k, pass_at_k_error : k = 1, 2, 4, ... <= samples -> the same for pass@k
    excluded : problems left out, whose gold answer cannot be read
    retention : cache length / sequence length at the end, over all completions, and over the correct ones
    length, truncated : mean tokens of a completion; share that ran into max_tokens
    forced : share that was given the text of a forced answer
    peak_entries : the most entries that a kv head held while decoding; longest_prompt: while prefilling
    read_entries : the most that a query of decoding read of a kv head
    mean_peak_entries : the same of each kv head, averaged over heads, layers and completions
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
    forced: float
    peak_entries: int
    read_entries: int
    mean_peak_entries: float
    longest_prompt: int
    tokens: int
    tokens_per_second: float
    seconds: float

    @property
    def budget(self) -> int | None:
        return self.parameters.get("budget")


def evaluate(
    tasks: Mapping[str, Task],
    policies: Sequence[Policy],
    sampling: SamplingConfig,
    open_engine: Callable[[Policy], AbstractContextManager[Engine]],
    decode: Callable[[list[list[int]]], list[str]],
    *,
    on_completion: Callable[[dict[str, Any]], None],
    on_row: Callable[[list[EvalRow]], None],
    progress: bool = True,
) -> list[EvalRow]:
    """One row per task and policy, tasks first.

    open_engine : policy -> a context with the engine that samples under it
    decode : token ids of completions -> their texts
    on_completion : is told each completion, as one line of a file of completions
    on_row : is told all rows so far, after each new one
    """
    order = [(task, place) for task in tasks for place in range(len(policies))]
    done: dict[tuple[str, int], EvalRow] = {}
    total = len(policies) * sum(len(task.prompts) for task in tasks.values())
    with tqdm(total=total, unit="problem", disable=None if progress else True) as bar:
        for place, policy in enumerate(policies):
            with open_engine(policy) as engine:
                for name, task in tasks.items():
                    bar.set_description(f"{name} · {policy.name}{_budget(policy)}")
                    point = Point(name, policy, sampling)
                    for problems, rollouts, seconds in sample_in_parts(engine, task.prompts, sampling):
                        asked = [problem for problem in problems for _ in range(sampling.n)]
                        texts = decode([rollout.completion_ids for rollout in rollouts])
                        scores = task.score(asked, texts, rollouts)
                        point.add(problems, rollouts, scores, seconds)
                        for line in point.lines(problems, rollouts, texts, scores):
                            on_completion(line)
                        bar.update(len(problems))
                    done[name, place] = point.row()
                    on_row([done[key] for key in order if key in done])
    return [done[key] for key in order]


class Point:
    """What is gathered of one task under one cache."""

    def __init__(self, task: str, policy: Policy, sampling: SamplingConfig) -> None:
        self.task, self.policy, self.sampling, self.samples = task, policy, sampling, sampling.n
        self.correct: list[int | None] = []  # per problem; None: left out
        self.kept: list[float] = []
        self.kept_correct: list[float] = []
        self.lengths: list[int] = []
        self.truncated, self.forced, self.peak, self.read, self.longest_prompt = 0, 0, 0, 0, 0
        self.seconds = 0.0
        self.peaks: list[float] = []  # per completion, the mean over layers and kv heads

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
            self.forced += bool(self.sampling.forced) and len(rollout.completion_ids) > self.sampling.forced_from
            prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
            peaks = rollout.trace.peak_counts(prompt)
            self.peaks.append(float(peaks.float().mean()))
            schedule = self.policy.schedule
            self.peak = max(
                self.peak, int(peaks.max()) if schedule.counts_vary else schedule.most_decoding(prompt, fed)
            )
            self.read = max(self.read, self.peak if schedule.counts_vary else self.policy.most_read(prompt, fed))
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
            yield {**where, **place, "correct": correct, "reward": score, **summary(rollout), "completion": text}

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
            forced=self.forced / len(self.lengths),
            peak_entries=self.peak,
            read_entries=self.read,
            mean_peak_entries=sum(self.peaks) / len(self.peaks),
            longest_prompt=self.longest_prompt,
            tokens=tokens,
            tokens_per_second=tokens / max(self.seconds, 1e-9),
            seconds=self.seconds,
        )


def _budget(policy: Policy) -> str:
    budget = policy.parameters().get("budget")
    return "" if budget is None else f" {budget}"
