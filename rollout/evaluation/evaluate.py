"""Evaluation: pass@k of every task under every cache policy.

Every problem is sampled n times. A completion is correct if its score is at least 1. A problem is excluded if a sample
has no score because the problem's gold answer cannot be read. pass@k is averaged over problems, with the standard error
over problems, because samples of one problem are not independent. All pairs of task and policy use the same seed. Each
policy has one engine, which samples for all tasks. Completions may be given further scores; each further score has its
own accuracy, over the problems that it can score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rollout.config import SamplingConfig
from rollout.engine import Engine, Rollout
from rollout.evaluation.entries import EntryCounts
from rollout.evaluation.estimators import mean_and_error, pass_at_k
from rollout.evaluation.samples import label, sample_in_parts, summary
from sparse_rl.policies.base import Policy
from sparse_rl.progress import stage

Score = Callable[[Sequence[int], Sequence[str], Sequence[Rollout]], list[float | None]]
Decode = Callable[[list[list[int]]], list[str]]
Line = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Problems, and the functions that score their completions.

    prompts : token ids, one list per problem
    score : function (problem of each completion, texts, rollouts) -> score of each completion, None if it has none
    further : name -> further score function
    """

    prompts: Sequence[Sequence[int]]
    score: Score
    further: Mapping[str, Score] = field(default_factory=dict)


@dataclass(frozen=True)
class Accuracy:
    """pass@1 by one score over `problems` problems, and its standard error.

    `accuracy` is None if no problem could be scored, `standard_error` for fewer than two problems.
    """

    accuracy: float | None
    standard_error: float | None
    problems: int


@dataclass(frozen=True)
class ContextCosts:
    """Costs of compacting the contexts of a task. All numbers but `contexts`, the number of contexts, are means over
    them.

    tokens : tokens of a context, including the tokens that the chat template puts in front of it
    bytes, whole_bytes : bytes of keys, values and biases, after and before the compaction
    seconds : duration of each stage; prefill and reference queries may have been shared with other rows
    """

    contexts: int
    tokens: float
    bytes: float
    whole_bytes: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class EvalRow:
    """Results of one task under one cache policy, or after one compaction of its contexts.

    accuracy : pass@1 over `problems` problems with `samples` samples each; None if no problem could be scored
    standard_error : standard error of accuracy over problems; None for fewer than two problems
    pass_at_k, pass_at_k_error : k = 1, 2, 4, ... <= samples -> pass@k, and its standard error
    further_accuracy : accuracy by each of the further scores
    excluded : number of excluded problems, whose gold answer cannot be read
    retention, retention_correct : cache length / sequence length at the end, mean over all completions, and over the
        correct ones
    length, truncated : mean number of tokens in a completion; share of completions that reached max_tokens
    forced : share of completions that got the text of a forced answer
    peak_entries : maximum number of entries that a kv head held in decoding
    longest_prompt : maximum number of entries that a kv head held in prefill
    read_entries : maximum number of entries of a kv head that a query read in decoding
    mean_peak_entries : peak of each kv head, averaged over heads, layers and completions
    contexts : costs of the compacted contexts; None if the task was evaluated without them
    """

    task: str
    policy: str
    parameters: dict[str, Any]
    problems: int
    samples: int
    excluded: int
    accuracy: float | None
    standard_error: float | None
    further_accuracy: dict[str, Accuracy]
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
    contexts: ContextCosts | None = None

    @property
    def budget(self) -> int | None:
        """The policy's budget; None if it has none."""
        return self.parameters.get("budget")


def evaluate(
    tasks: Mapping[str, Task],
    policies: Sequence[Policy],
    sampling: SamplingConfig,
    open_engine: Callable[[Policy], AbstractContextManager[Engine]],
    decode: Decode,
    *,
    on_completion: Callable[[Line], None],
    on_row: Callable[[list[EvalRow]], None],
    progress: bool = True,
) -> list[EvalRow]:
    """Evaluate every task under every policy. Returns one row per task and policy, ordered by task first.

    open_engine : function policy -> context manager of the engine that samples under it
    decode : function token ids of completions -> their texts
    on_completion : called with each completion, as one line of a file of completions
    on_row : called with all rows so far, after each new one
    """
    order = [(task, place) for task in tasks for place in range(len(policies))]
    done: dict[tuple[str, int], EvalRow] = {}
    total = len(policies) * sum(len(task.prompts) for task in tasks.values())
    with stage("evaluating", total=total, unit="problem", shown=progress) as shown:
        for place, policy in enumerate(policies):
            with open_engine(policy) as engine:
                for name, task in tasks.items():
                    shown.tell(f"{name}, {label(policy)}")
                    point = Point(name, task, sampling, engine.policy)
                    for problems, rollouts, seconds in sample_in_parts(engine, task.prompts, sampling):
                        for line in point.judge(problems, rollouts, seconds, decode):
                            on_completion(line)
                        shown.advance(len(problems))
                    done[name, place] = point.row()
                    on_row([done[key] for key in order if key in done])
    return [done[key] for key in order]


class Point:
    """Collects the results of one task under one cache policy, or after one compaction of its contexts.

    cache : a policy, or the name and the settings of a compaction of contexts
    """

    def __init__(
        self, name: str, task: Task, sampling: SamplingConfig, cache: Policy | tuple[str, dict[str, Any]]
    ) -> None:
        self.name, self.task, self.sampling, self.samples = name, task, sampling, sampling.n
        policy = None if isinstance(cache, tuple) else cache
        self.policy, self.parameters = cache if isinstance(cache, tuple) else (cache.name, cache.parameters())
        self.correct: list[int | None] = []  # number of correct samples of each problem; None means excluded
        self.further: dict[str, list[int | None]] = {name: [] for name in task.further}
        self.lines: list[Line] = []  # lines of completions, without their texts
        self.seconds = 0.0
        self.entries = EntryCounts(policy)

    def judge(self, problems: Sequence[int], rollouts: Sequence[Rollout], seconds: float, decode: Decode) -> list[Line]:
        """Score the completions of some problems, and add them to the results. Returns their lines for
        eval_completions.jsonl.

        problems : indices of the problems
        rollouts : the rollouts of these problems, problem by problem
        seconds : time that the engine took
        """
        sample_problems = [problem for problem in problems for _ in range(self.samples)]
        texts = decode([rollout.completion_ids for rollout in rollouts])
        scores = self.task.score(sample_problems, texts, rollouts)
        further = {key: score(sample_problems, texts, rollouts) for key, score in self.task.further.items()}
        self.correct += count_correct(scores, self.samples)
        for name, more_scores in further.items():
            self.further[name] += count_correct(more_scores, self.samples)
        self.seconds += seconds
        lines: list[Line] = []
        for i, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            self.entries.add(rollout)
            line: Line = {"task": self.name, "policy": self.policy, "parameters": self.parameters}
            line |= {"problem": sample_problems[i], "sample": i % self.samples}
            line |= {"correct": None if score is None else score >= 1, "reward": score}
            if further:
                line["further_rewards"] = {name: score_list[i] for name, score_list in further.items()}
            lines.append(line | summary(rollout))
        self.lines += lines
        return [{**line, "completion": text} for line, text in zip(lines, texts, strict=True)]

    def row(self, contexts: ContextCosts | None = None) -> EvalRow:
        counted = [c for c in self.correct if c is not None]
        ks = [2**i for i in range(self.samples.bit_length())] if counted else []
        pass_at = {k: mean_and_error([pass_at_k(self.samples, c, k) for c in counted]) for k in ks}
        accuracy, error = pass_at.get(1, (None, None))
        kept = [line["retention"] for line in self.lines]
        kept_correct = [line["retention"] for line in self.lines if line["correct"]]
        lengths = [line["tokens"] for line in self.lines]
        tokens, completions, settings = sum(lengths), len(lengths), self.sampling
        return EvalRow(
            task=self.name,
            policy=self.policy,
            parameters=self.parameters,
            problems=len(counted),
            samples=self.samples,
            excluded=len(self.correct) - len(counted),
            accuracy=accuracy,
            standard_error=error,
            further_accuracy={name: self._accuracy(correct) for name, correct in self.further.items()},
            pass_at_k={k: mean for k, (mean, _) in pass_at.items() if mean is not None},
            pass_at_k_error={k: se for k, (_, se) in pass_at.items()},
            retention=sum(kept) / completions,
            retention_correct=sum(kept_correct) / len(kept_correct) if kept_correct else None,
            length=tokens / completions,
            truncated=sum(line["finish_reason"] == "length" for line in self.lines) / completions,
            forced=sum(bool(settings.forced) and length > settings.forced_from for length in lengths) / completions,
            peak_entries=self.entries.peak,
            read_entries=self.entries.read,
            mean_peak_entries=self.entries.mean_peak,
            longest_prompt=self.entries.longest_prompt,
            tokens=tokens,
            tokens_per_second=tokens / max(self.seconds, 1e-9),
            seconds=self.seconds,
            contexts=contexts,
        )

    def _accuracy(self, correct: Sequence[int | None]) -> Accuracy:
        shares = [count / self.samples for count in correct if count is not None]
        return Accuracy(*mean_and_error(shares), len(shares))


def count_correct(scores: Sequence[float | None], samples: int) -> list[int | None]:
    """Return the number of correct samples of each problem, or None for a problem with a sample that has no score.

    scores : scores of all samples, problem by problem
    """
    problems = [scores[start : start + samples] for start in range(0, len(scores), samples)]
    return [
        None if None in problem_scores else sum(score is not None and score >= 1 for score in problem_scores)
        for problem_scores in problems
    ]
