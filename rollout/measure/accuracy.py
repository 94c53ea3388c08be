"""Accuracy: pass@k of every task under every cache policy.

A completion is correct if its score is at least 1. A problem is excluded if one of its n samples has no score because
the problem's gold answer cannot be read. pass@k is averaged over problems, with the standard error over problems,
because samples of one problem are not independent. Each further score has its own accuracy, over the problems that it
can score.

A row is computed from the lines of the journal (journal.py) alone, so an evaluation that was interrupted, or shared by
several processes, ends with the same rows, except for times.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from statistics import mean
from typing import Any

from rollout.config import SamplingConfig
from rollout.context import Context
from rollout.context.config import PromptCacheConfig
from rollout.engine import Engine, Rollout
from rollout.measure.journal import Journal, Line, Point, settings_of
from rollout.sampling import NotFiniteLogprobError
from rollout.turns import Conversation, Message
from sparse_rl.methods.config import budget_words
from sparse_rl.policies.base import Policy
from sparse_rl.progress import Stage


def sample_in_parts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    context: Context | None = None,
    finished: Container[int] = (),
    converse: Converse | None = None,
) -> Iterator[tuple[list[int], list[Any], float]]:
    """Sample in parts of a few full batches. Yields, for each part, (indices of its prompts, their rollouts prompt by
    prompt, seconds that the engine took). Equal prompts stay in one part, because the engine gives their samples
    different seeds only within one call.

    context : compacted context that all prompts continue, if any
    finished : indices of finished prompts, which do not change the parts; a part with only such prompts is skipped
    converse : samples conversations, which are yielded in the place of rollouts
    """
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        places_of.setdefault(tuple(prompt), []).append(place)
    size = math.lcm(sampling.n, engine.max_batch) // sampling.n
    parts: list[list[int]] = []
    for places in places_of.values():
        if not parts or len(parts[-1]) >= size:
            parts.append([])
        parts[-1] += places
    for part in parts:
        if all(place in finished for place in part):
            continue
        start = time.perf_counter()
        try:
            if converse is not None:
                sampled: list[Any] = converse(engine, part, sampling)
            else:
                sampled = engine.generate([list(prompts[place]) for place in part], sampling, context)
        except NotFiniteLogprobError as error:
            raise error.of_prompt(part[error.prompt]) from error
        yield part, sampled, time.perf_counter() - start


def label(policy: Policy) -> str:
    """Return a policy's name and, if it has one, its budget."""
    return " ".join(filter(None, (policy.name, budget_words(policy.parameters().get("budget")))))


def totals(lines: Sequence[Line], tokens: int) -> dict[str, Any]:
    """Return the fields of a row that are computed alike from all lines, whose rollouts have `tokens` tokens in all."""
    seconds = sum(line["seconds"] for line in lines)
    means = [line["mean_entries"] for line in lines if line.get("mean_entries") is not None]
    lacking = any("mean_entries" not in line for line in lines)  # a journal of an earlier version
    return {
        "retention": sum(line["retention"] for line in lines) / len(lines),
        "peak_entries": max(line["peak_entries"] for line in lines),
        "read_entries": max(line["read_entries"] for line in lines),
        "mean_peak_entries": sum(line["mean_peak_entries"] for line in lines) / len(lines),
        "mean_entries": None if lacking or not means else mean(means),
        **{"tokens": tokens, "tokens_per_second": tokens / max(seconds, 1e-9), "seconds": seconds},
    }


def summary(rollout: Rollout) -> dict[str, Any]:
    """Return the keys and values that describe a rollout in a file of completions, except the completion's text."""
    return {
        "finish_reason": rollout.finish_reason,
        "tokens": sum(rollout.sampled),
        "retention": rollout.trace.retention(),
        "mean_logprob": sum(rollout.logprobs) / sum(rollout.sampled),
    }


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k if c of n samples are correct, 1 - C(n - c, k) / C(n, k) (Chen et al.
    2021).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean of independent values, None without values, and its standard error, None for fewer than two."""
    if not values:
        return None, None
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def entry_counts(rollout: Rollout, policy: Policy | None) -> dict[str, float | None]:
    """Count the cache entries of one rollout in decoding, in layers without a sliding window: the fields of EvalRow.

    policy : the policy; under one whose kv heads hold equal numbers, peaks are means over the layers, rounded up. None
        for a sequence that continues a compacted context
    """
    prompt, fed = len(rollout.prompt_ids), len(rollout.trace) - 1
    counts = rollout.trace.policy_part().decoding_counts(prompt)
    peaks = counts.amax(-1)
    peak = read = int(peaks.max())
    if policy is not None and not policy.schedule.counts_vary:
        schedule = policy.schedule  # says what is held after the prompt, if no query decodes
        peak = math.ceil(peaks.double().mean()) if fed > prompt else schedule.most_decoding(prompt, fed)
        read = min(peak, policy.most_read(prompt, fed))
    entries = float(counts.double().mean()) if fed > prompt else None  # one token is decoded by no query
    means = {"mean_peak_entries": float(peaks.float().mean()), "mean_entries": entries}
    return {"peak_entries": peak, "read_entries": read, **means}


def turn_counts(turns: Sequence[Rollout], policy: Policy | None) -> dict[str, float | None]:
    """Count the cache entries of a conversation: peaks are those of the turn that held the most.

    turns : the rollout of each turn if turns were prefilled, else the one of the whole conversation
    policy : the policy. If it reads chunks, only traces tell what a query in a chunk reads: more than its schedule says
    """
    counts = [entry_counts(turn, None if policy is None or policy.reads_chunks else policy) for turn in turns]
    peaks: dict[str, Any] = {name: max(one[name] or 0 for one in counts) for name in counts[0]}
    fed = [len(turn.completion_ids) - 1 for turn in turns]
    entries = sum((one["mean_entries"] or 0) * n for one, n in zip(counts, fed, strict=True))
    return {**peaks, "mean_entries": entries / sum(fed) if any(fed) else None}


Converse = Callable[[Engine, Sequence[int], SamplingConfig], list[Conversation]]
Score = Callable[[Sequence[int], Sequence[str | list[Message]], Sequence[Rollout], Sequence[Any]], list[float | None]]
Decode = Callable[[list[list[int]]], list[str]]


@dataclass(frozen=True)
class Task:
    """Problems, and the functions that score their completions.

    prompts : token ids, one list per problem
    decode : function token ids of completions -> their texts
    score : function (problem of each completion, texts or messages, rollouts, environments of conversations) -> score
        of each completion, None if it has none
    further : name -> further score function
    identity : digest of everything that determines the task's results, except the cache policy
    converse : function (engine, problems, settings) -> conversations, problem by problem; None for single completions
    """

    prompts: Sequence[Sequence[int]]
    decode: Decode
    score: Score
    further: Mapping[str, Score] = field(default_factory=dict)
    identity: str = ""
    converse: Converse | None = None


@dataclass(frozen=True)
class Accuracy:
    """pass@1 by one score over `problems` problems, None without problems, and its standard error."""

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


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """The fields of a row about its model and cache: what `totals` returns for its completions or pieces.

    retention : cache length / sequence length at the end, mean over all of them
    peak_entries : maximum number of entries that a kv head held in decoding
    read_entries : maximum number of entries of a kv head that a query read in decoding
    mean_peak_entries : peak of each kv head, averaged over heads, layers and completions
    mean_entries : entries of a kv head when a decoding query attends, mean over queries, heads, layers and completions
    tokens : number of decoded tokens
    seconds : time that the engine took, with prefill, added up over the processes that took part
    """

    model: str
    policy: str
    parameters: dict[str, Any]
    retention: float
    peak_entries: int
    read_entries: int
    mean_peak_entries: float
    tokens: int
    tokens_per_second: float
    seconds: float
    mean_entries: float | None = None


@dataclass(frozen=True, kw_only=True)
class EvalRow(CacheRow):
    """Results of one task under one cache policy, or after one compaction of its contexts.

    accuracy : pass@1 over `problems` problems with `samples` samples each; None if no problem could be scored
    standard_error : standard error of accuracy over problems; None for fewer than two problems
    pass_at_k, pass_at_k_error : k = 1, 2, 4, ... <= samples -> pass@k, and its standard error
    further_accuracy : accuracy by each of the further scores
    excluded : number of excluded problems, whose gold answer cannot be read
    retention_correct : `retention` over the correct completions
    length, truncated : mean number of tokens in a completion; share of completions that reached max_tokens
    forced : share of completions that got the text of a forced answer
    longest_prompt : number of tokens in the longest prompt, which is prefilled; of turns that are prefilled, too
    contexts : costs of the compacted contexts; None if the task was evaluated without them
    log_perplexity : mean negative log-likelihood per token, in nats at temperature 1, of the full cache's answers after
        the compacted contexts, averaged over the samples of a problem, then over problems (AM appendix F.2); None
        if the task was evaluated without a full cache of its contexts
    log_perplexity_error : standard error of log_perplexity over problems; None for fewer than two problems
    turns, tool_failures : mean numbers of turns, and of failed calls of tools, in a conversation; None without tools
    """

    task: str
    problems: int
    samples: int
    excluded: int
    accuracy: float | None
    standard_error: float | None
    further_accuracy: dict[str, Accuracy]
    pass_at_k: dict[int, float]
    pass_at_k_error: dict[int, float | None]
    retention_correct: float | None
    length: float
    truncated: float
    forced: float
    longest_prompt: int
    contexts: ContextCosts | None = None
    log_perplexity: float | None = None
    log_perplexity_error: float | None = None
    turns: float | None = None
    tool_failures: float | None = None


class TaskPoint(Point):
    """One task under one cache policy, or after one compaction of its contexts: a line for each completion.

    cache : the policy, or the settings of the compaction
    reference : point of the full cache, whose answers are scored under this point's cache, too (contexts.py). By
        default the point of a full context is its own reference, and any other point has None
    """

    name, unit = "evaluating", "problem"

    def __init__(
        self,
        task_name: str,
        model: str,
        task: Task,
        sampling: SamplingConfig,
        journal: Journal,
        cache: Policy | PromptCacheConfig,
        reference: TaskPoint | None = None,
    ) -> None:
        self.task_name, self.model, self.task, self.sampling = task_name, model, task, sampling
        whole = isinstance(cache, PromptCacheConfig) and cache.keeps_all
        self.reference = self if reference is None and whole else reference
        scored = [] if self.reference is None else ["references" if self.reference is self else self.reference.key]
        determining = task.identity, task_name, asdict(sampling), settings_of(cache), *scored
        super().__init__(journal, cache, len(task.prompts), *determining)

    @property
    def finished(self) -> int:
        return len(self.finished_problems())

    def finished_problems(self) -> set[int]:
        counts = Counter(problem for problem, _ in self.journal.units(self.key))
        return {problem for problem, count in counts.items() if count == self.sampling.n}

    def measure(self, engine: Engine, shown: Stage) -> None:
        shown.tell(f"{self.task_name}, {label(self.cache)}")
        finished = self.finished_problems()
        converse = self.task.converse
        parts = sample_in_parts(engine, self.task.prompts, self.sampling, finished=finished, converse=converse)
        for problems, sampled, seconds in parts:
            self.judge(problems, sampled, seconds, engine.policy)
            shown.advance(len(set(problems) - finished))

    def judge(
        self,
        problems: Sequence[int],
        sampled: Sequence[Rollout] | Sequence[Conversation],
        seconds: float,
        cache: Policy | tuple[str, dict[str, Any]],
        scored: Sequence[Line] | None = None,
        **more: Any,
    ) -> None:
        """Score the completions of some problems, and write them to the journal.

        problems, sampled : indices of the problems, and their rollouts or conversations, problem by problem
        cache : the engine's policy, or the name and the settings of a compaction
        scored : further keys and values of the line of each rollout, if any
        more : further keys and values of all lines
        """
        samples = self.sampling.n
        sample_problems = [problem for problem in problems for _ in range(samples)]
        talks = [one for one in sampled if isinstance(one, Conversation)]
        rollouts = [one.whole() if isinstance(one, Conversation) else one for one in sampled]
        texts = [one.messages for one in talks] or self.task.decode([rollout.completion_ids for rollout in rollouts])
        judged = sample_problems, texts, rollouts, [one.environment for one in talks]
        scores = self.task.score(*judged)
        further = {key: score(*judged) for key, score in self.task.further.items()}
        policy = None if isinstance(cache, tuple) else cache
        named, parameters = cache if isinstance(cache, tuple) else (cache.name, cache.parameters())
        lines: list[Line] = []
        for i, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
            problem, sample = sample_problems[i], i % samples
            rewards = {name: score_list[i] for name, score_list in further.items()}
            lines.append(
                {
                    **{"task": self.task_name, "policy": named, "parameters": parameters},
                    **{"problem": problem, "sample": sample},
                    **{"correct": None if score is None else score >= 1, "reward": score},
                    **({"further_rewards": rewards} if further else {}),
                    **summary(rollout),
                    "prompt_tokens": len((talks[i].rollouts[-1] if talks else rollout).prompt_ids),
                    **(turn_counts(talks[i].rollouts, policy) if talks else entry_counts(rollout, policy)),
                    **({"turns": talks[i].turns, "tool_failures": talks[i].failures} if talks else {}),
                    **({} if scored is None else scored[i]),
                    "seconds": seconds / len(rollouts),
                    **more,
                    **{"point": self.key, "unit": [problem, sample], "completion": texts[i]},
                }
            )
        self.journal.add(lines)

    def row(self) -> EvalRow:
        finished, settings = self.finished_problems(), self.sampling
        lines = [line for line in self.journal.lines(self.key) if line["unit"][0] in finished]
        correct = count_correct([line["reward"] for line in lines], settings.n)
        counted = [count for count in correct if count is not None]
        ks = [2**i for i in range(settings.n.bit_length())] if counted else []
        pass_at = {k: mean_and_error([pass_at_k(settings.n, c, k) for c in counted]) for k in ks}
        accuracy, error = pass_at.get(1, (None, None))
        by_problem = groupby(lines if self.reference else (), key=lambda line: line["unit"][0])  # lines are in order
        nll, nll_error = mean_and_error([mean(line["reference_nll"] for line in own) for _, own in by_problem])
        kept_correct = [line["retention"] for line in lines if line["reward"] is not None and line["reward"] >= 1]
        lengths = [line["tokens"] for line in lines]
        tokens, completions = sum(lengths), len(lengths)
        return EvalRow(
            model=self.model,
            task=self.task_name,
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
            retention_correct=sum(kept_correct) / len(kept_correct) if kept_correct else None,
            length=tokens / completions,
            truncated=sum(line["finish_reason"] == "length" for line in lines) / completions,
            forced=sum(bool(settings.forced) and length > settings.forced_from for length in lengths) / completions,
            longest_prompt=max(line["prompt_tokens"] for line in lines),
            **totals(lines, tokens),
            contexts=_mean_costs({line["context"]: line["costs"] for line in lines if "context" in line}),
            log_perplexity=nll,
            log_perplexity_error=nll_error,
            **{name: mean(line[name] for line in lines) for name in ("turns", "tool_failures") if name in lines[0]},
        )

    def _accuracy(self, scores: Sequence[float | None]) -> Accuracy:
        shares = [count / self.sampling.n for count in count_correct(scores, self.sampling.n) if count is not None]
        return Accuracy(*mean_and_error(shares), len(shares))


def _mean_costs(costs: Mapping[int, Mapping[str, Any]]) -> ContextCosts | None:
    if not costs:
        return None
    every = list(costs.values())
    seconds = {name: mean(item["seconds"].get(name, 0.0) for item in every) for name in every[0]["seconds"]}
    sizes = {name: mean(item[name] for item in every) for name in ("tokens", "bytes", "whole_bytes")}
    return ContextCosts(len(every), **sizes, seconds=seconds)


def count_correct(scores: Sequence[float | None], samples: int) -> list[int | None]:
    """Return the number of correct samples of each problem, None for one with a sample that has no score."""
    problems = (scores[start : start + samples] for start in range(0, len(scores), samples))
    return [None if None in own else sum(score is not None and score >= 1 for score in own) for own in problems]
