"""Evaluation: pass@k of every task under every cache policy.

Every problem is sampled n times. A completion is correct if its score is at least 1. A problem is excluded if a sample
has no score because the problem's gold answer cannot be read. pass@k is averaged over problems, with the standard error
over problems, because samples of one problem are not independent. All pairs of task and policy use the same seed. Each
policy has one engine, which samples for all tasks. Completions may be given further scores; each further score has its
own accuracy, over the problems that it can score.

Every completion is a line of the journal (journal.py). A row is computed from these lines alone, so an evaluation that
was interrupted, or shared by several processes, ends with the same rows, except for times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import mean
from typing import Any

from rollout.config import SamplingConfig
from rollout.context.config import PromptCacheConfig
from rollout.engine import Engine, Rollout
from rollout.evaluation.entries import entry_counts
from rollout.evaluation.estimators import mean_and_error, pass_at_k
from rollout.evaluation.journal import Journal, Line, point_key, settings_of, work
from rollout.evaluation.samples import label, sample_in_parts, summary
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage, stage

Score = Callable[[Sequence[int], Sequence[str], Sequence[Rollout]], list[float | None]]
Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True)
class Task:
    """Problems, and the functions that score their completions.

    prompts : token ids, one list per problem
    score : function (problem of each completion, texts, rollouts) -> score of each completion, None if it has none
    further : name -> further score function
    identity : digest of everything that determines the task's results, except the cache policy
    """

    prompts: Sequence[Sequence[int]]
    score: Score
    further: Mapping[str, Score] = field(default_factory=dict)
    identity: str = ""


@dataclass(frozen=True)
class Accuracy:
    """pass@1 by one score over `problems` problems, and its standard error.

    `accuracy` is None if no problem could be scored. `standard_error` is None for fewer than two problems.
    """

    accuracy: float | None
    standard_error: float | None
    problems: int


@dataclass(frozen=True)
class ContextCosts:
    """Costs of compacting the contexts of a task. `contexts` is their number; the other fields are means over them.

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
    longest_prompt : number of tokens in the longest prompt, which is prefilled
    read_entries : maximum number of entries of a kv head that a query read in decoding
    mean_peak_entries : peak of each kv head, averaged over heads, layers and completions
    seconds : time that the engine took, added up over the processes that took part
    contexts : costs of the compacted contexts; None if the task was evaluated without them
    log_perplexity : mean negative log-likelihood per token, in nats at temperature 1, of the full cache's answers after
        the compacted contexts, averaged over the samples of a problem, then over problems (AM appendix F.2); None
        if the task was evaluated without a full cache of its contexts
    log_perplexity_error : standard error of log_perplexity over problems; None for fewer than two problems
    """

    model: str
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
    log_perplexity: float | None = None
    log_perplexity_error: float | None = None

    @property
    def budget(self) -> int | None:
        """The policy's budget; None if it has none."""
        return self.parameters.get("budget")


def evaluate(
    points: Sequence[Point],
    open_engine: Callable[[Policy], AbstractContextManager[Engine]],
    decode: Decode,
    journal: Journal,
    *,
    on_point: Callable[[], object],
    progress: bool = True,
) -> None:
    """Finish the points: sample and score the problems that are not in the journal yet. Points on which another process
    works are skipped.

    points : one for each pair of a task and a policy; points with the same policy share an engine
    open_engine : function policy -> context manager of the engine that samples under it
    decode : function token ids of completions -> their texts
    on_point : called after each finished point
    """
    with evaluating(points, progress) as shown:

        def sample(point: Point, engine: Engine) -> None:
            shown.tell(f"{point.name}, {label(point.cache)}")
            finished = point.finished()
            for problems, rollouts, seconds in sample_in_parts(
                engine, point.task.prompts, point.sampling, finished=finished
            ):
                point.judge(problems, rollouts, seconds, decode, engine.policy)
                shown.advance(len(set(problems) - finished))

        work(points, open_engine, journal, sample, on_point)


@contextmanager
def evaluating(points: Iterable[Point], progress: bool) -> Iterator[Stage]:
    """Show the progress of an evaluation over the problems of all points."""
    sizes = [(len(point.finished()), len(point.task.prompts)) for point in points]
    done, total = (sum(numbers) for numbers in zip(*sizes, strict=True))
    with stage("evaluating", total=total, unit="problem", shown=progress, done=done) as shown:
        yield shown


class Point:
    """One task under one cache policy, or after one compaction of its contexts. Its results are lines of the journal.

    model : name of the model that is evaluated
    cache : the policy, or the settings of the compaction
    reference : point of the full cache, whose answers are scored under this point's cache, too (references.py). By
        default the point of a full context is its own reference, and any other point has None
    """

    def __init__(
        self,
        name: str,
        model: str,
        task: Task,
        sampling: SamplingConfig,
        journal: Journal,
        cache: Policy | PromptCacheConfig,
        reference: Point | None = None,
    ) -> None:
        self.name, self.model, self.task, self.sampling = name, model, task, sampling
        self.journal = journal
        self.cache: Any = cache
        whole = isinstance(cache, PromptCacheConfig) and cache.keeps_all
        self.reference = self if reference is None and whole else reference
        scored = [] if self.reference is None else ["references" if self.reference is self else self.reference.key]
        self.key: str = point_key(task.identity, name, asdict(sampling), settings_of(cache), *scored)

    @property
    def complete(self) -> bool:
        """True if the journal holds all samples of all problems."""
        return len(self.finished()) == len(self.task.prompts)

    def finished(self) -> set[int]:
        """Return the indices of the problems all of whose samples are in the journal."""
        counts = Counter(problem for problem, _ in self.journal.units(self.key))
        return {problem for problem, count in counts.items() if count == self.sampling.n}

    def judge(
        self,
        problems: Sequence[int],
        rollouts: Sequence[Rollout],
        seconds: float,
        decode: Decode,
        cache: Policy | tuple[str, dict[str, Any]],
        scored: Sequence[Line] | None = None,
        **more: Any,
    ) -> None:
        """Score the completions of some problems, and write them to the journal.

        problems : indices of the problems
        rollouts : the rollouts of these problems, problem by problem
        seconds : time that the engine took
        cache : the engine's policy, or the name and the settings of a compaction
        scored : further keys and values of the line of each rollout; None means that there are none
        more : further keys and values of all lines
        """
        samples = self.sampling.n
        sample_problems = [problem for problem in problems for _ in range(samples)]
        texts = decode([rollout.completion_ids for rollout in rollouts])
        scores = self.task.score(sample_problems, texts, rollouts)
        further = {key: score(sample_problems, texts, rollouts) for key, score in self.task.further.items()}
        policy = None if isinstance(cache, tuple) else cache
        named, parameters = cache if isinstance(cache, tuple) else (cache.name, cache.parameters())
        lines: list[Line] = []
        for i, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            problem, sample = sample_problems[i], i % samples
            line: Line = {"task": self.name, "policy": named, "parameters": parameters}
            line |= {"problem": problem, "sample": sample}
            line |= {"correct": None if score is None else score >= 1, "reward": score}
            if further:
                line["further_rewards"] = {name: score_list[i] for name, score_list in further.items()}
            line |= {**summary(rollout), "prompt_tokens": len(rollout.prompt_ids), **entry_counts(rollout, policy)}
            line |= {} if scored is None else scored[i]
            line |= {"seconds": seconds / len(rollouts), **more, "point": self.key, "unit": [problem, sample]}
            lines.append(line | {"completion": texts[i]})
        self.journal.add(lines)

    def row(self) -> EvalRow:
        """Return the row of the point, computed from the journal. Requires at least one finished problem."""
        finished, settings = self.finished(), self.sampling
        lines = [line for line in self.journal.lines(self.key) if line["problem"] in finished]
        correct = count_correct([line["reward"] for line in lines], settings.n)
        counted = [count for count in correct if count is not None]
        ks = [2**i for i in range(settings.n.bit_length())] if counted else []
        pass_at = {k: mean_and_error([pass_at_k(settings.n, c, k) for c in counted]) for k in ks}
        accuracy, error = pass_at.get(1, (None, None))
        nlls = [mean(line["reference_nll"] for line in own) for own in _by_problem(lines)] if self.reference else []
        nll, nll_error = mean_and_error(nlls)
        kept = [line["retention"] for line in lines]
        kept_correct = [line["retention"] for line in lines if line["correct"]]
        lengths = [line["tokens"] for line in lines]
        tokens, completions, seconds = sum(lengths), len(lengths), sum(line["seconds"] for line in lines)
        return EvalRow(
            model=self.model,
            task=self.name,
            policy=lines[0]["policy"],
            parameters=lines[0]["parameters"],
            problems=len(counted),
            samples=settings.n,
            excluded=len(correct) - len(counted),
            accuracy=accuracy,
            standard_error=error,
            further_accuracy={
                name: self._accuracy([line["further_rewards"][name] for line in lines]) for name in self.task.further
            },
            pass_at_k={k: mean for k, (mean, _) in pass_at.items() if mean is not None},
            pass_at_k_error={k: se for k, (_, se) in pass_at.items()},
            retention=sum(kept) / completions,
            retention_correct=sum(kept_correct) / len(kept_correct) if kept_correct else None,
            length=tokens / completions,
            truncated=sum(line["finish_reason"] == "length" for line in lines) / completions,
            forced=sum(bool(settings.forced) and length > settings.forced_from for length in lengths) / completions,
            peak_entries=max(line["peak_entries"] for line in lines),
            read_entries=max(line["read_entries"] for line in lines),
            mean_peak_entries=sum(line["mean_peak_entries"] for line in lines) / completions,
            longest_prompt=max(line["prompt_tokens"] for line in lines),
            tokens=tokens,
            tokens_per_second=tokens / max(seconds, 1e-9),
            seconds=seconds,
            contexts=_mean_costs({line["context"]: line["costs"] for line in lines if "context" in line}),
            log_perplexity=nll,
            log_perplexity_error=nll_error,
        )

    def _accuracy(self, scores: Sequence[float | None]) -> Accuracy:
        shares = [count / self.sampling.n for count in count_correct(scores, self.sampling.n) if count is not None]
        return Accuracy(*mean_and_error(shares), len(shares))


def _by_problem(lines: Sequence[Line]) -> list[list[Line]]:
    return [list(own) for _, own in groupby(lines, key=lambda line: line["problem"])]  # lines are ordered by problem


def _mean_costs(costs: Mapping[int, Mapping[str, Any]]) -> ContextCosts | None:
    """Return the mean costs of contexts, given as index of the context -> costs. Returns None if there are none."""
    if not costs:
        return None
    all_costs = list(costs.values())
    seconds = {name: mean(item["seconds"][name] for item in all_costs) for name in all_costs[0]["seconds"]}
    tokens, kept_bytes, whole = (mean(item[name] for item in all_costs) for name in ("tokens", "bytes", "whole_bytes"))
    return ContextCosts(len(all_costs), tokens, kept_bytes, whole, seconds)


def count_correct(scores: Sequence[float | None], samples: int) -> list[int | None]:
    """Return the number of correct samples of each problem, or None for a problem with a sample that has no score.

    scores : scores of all samples, problem by problem
    """
    problems = [scores[start : start + samples] for start in range(0, len(scores), samples)]
    return [
        None if None in problem_scores else sum(score is not None and score >= 1 for score in problem_scores)
        for problem_scores in problems
    ]
