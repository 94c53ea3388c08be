"""The numbers of the analyses of `sparse-rl plot --figure`.

Each is a function (sources, choice) -> plain values for JSON; FIGURES in plot.py lists them. The figures of attention
need the model, which runs once over each sequence under its trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollout.attended import LayerAttention, attention_cells, cell_size, hand_out, window_scores
from rollout.engine import Rollout
from rollout.verify import check_model
from sparse_rl.analysis import attention as analysis
from sparse_rl.analysis import kept
from sparse_rl.analysis.drawing import policy_settings, policy_words
from sparse_rl.commands.plot import Choice, Numbers
from sparse_rl.commands.recordings import Recording
from sparse_rl.errors import UserError, one_line
from sparse_rl.methods.config import KVpopPolicyConfig
from sparse_rl.methods.kvpop.config import ATTACHED_AS as SCORERS
from sparse_rl.methods.kvpop.target import oracle_recall
from sparse_rl.progress import stage

# ---- kept tokens -----------------------------------------------------------------------------------------------------


def evict_ratio(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    return kept.evict_ratios(source.traces, source.named)


def positions(sources: Sequence[Recording], choice: Choice) -> Numbers:
    return kept.compared_positions(
        [("/".join(source.path.absolute().parts[-2:]), source.named, source.each_trace()) for source in sources]
    )


def kept_heads(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    line, rollout = source.longest() if choice.line is None else (choice.line, source.rollout(choice.line))
    ids = rollout.prompt_ids + rollout.completion_ids
    return kept.kept_heads(rollout.trace, ids, source.named, source.strings, line, choice.last)


def cloud(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    sequences = ((r.prompt_ids + r.completion_ids, r.trace) for r in source.each())
    return kept.cloud(sequences, source.strings, source.named, choice.layer, choice.head)


def kept_text(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    line = choice.line or 1
    rollout = source.rollout(line)
    ids = rollout.prompt_ids + rollout.completion_ids
    return kept.kept_text(rollout.trace, ids, source.named, source.strings, line, choice.layer, choice.head)


# ---- attention -------------------------------------------------------------------------------------------------------


def _words(source: Recording) -> Numbers:
    """Return the model, the policy's name and the policy in words, for titles."""
    method, policy = policy_words(source.fingerprint)
    return {"model": one_line(source.named["model"], 60), "method": method, "policy": policy}


def _chosen(source: Recording, line: int | None) -> Sequence[Rollout]:
    """Return the rollout of a line, or all rollouts if it is None. Raises UserError if they cannot be run again."""
    chosen = source.rollouts if line is None else [source.rollout(line)]
    check_model(source.origin, source.config, source.directory)
    return chosen


def _each(source: Recording, rollouts: Sequence[Rollout], run: Callable[[Rollout], None]) -> None:
    with stage("attention", source.path.name, total=len(rollouts), unit="sequence") as row:
        for rollout in rollouts:
            run(rollout)
            row.advance()


def overlap(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    results: dict[int, list[Tensor]] = defaultdict(list)
    widths: list[int] = []

    def run(rollout: Rollout) -> None:
        windows = analysis.observation_windows(len(rollout.prompt_ids), len(rollout.trace), choice.last)

        def take(layer: LayerAttention) -> None:
            scores = [window_scores(layer, *window).cpu() for window in windows]
            held = [layer.evict_at[:, :first].cpu() > first for first, _ in windows]
            results[layer.index].append(analysis.overlaps(scores, held))

        if windows:
            hand_out(source.model, rollout, take)
            widths.append(windows[0][1] - windows[0][0])

    rollouts = _chosen(source, choice.line)
    _each(source, rollouts, run)
    note = analysis.raw_note(rollouts[0].trace)
    return {**_words(source), "note": note, **analysis.overlap_numbers(results, widths)}


def sparsity(sources: Sequence[Recording], choice: Choice) -> Numbers:
    return {"levels": list(analysis.LEVELS), "sources": [_sparsity(source, choice) for source in sources]}


def _sparsity(source: Recording, choice: Choice) -> Numbers:
    results: dict[int, list[Tensor]] = defaultdict(list)
    counts: list[float] = []

    def run(rollout: Rollout) -> None:
        fed, of_layers = len(rollout.trace) - 1, []
        first = fed - analysis.OBSERVED

        def take(layer: LayerAttention) -> None:
            counted = analysis.counted_tokens(rollout.trace, layer.index, first, choice.last)
            results[layer.index].append(analysis.sparsity(window_scores(layer, first, fed).cpu(), counted))
            of_layers.append(float(counted.sum(-1).double().mean()))

        if first > analysis.OBSERVED:
            hand_out(source.model, rollout, take)
            counts.append(sum(of_layers) / len(of_layers))

    rollouts = _chosen(source, choice.line)
    _each(source, rollouts, run)
    note = analysis.raw_note(rollouts[0].trace)
    return {**_words(source), "note": note, **analysis.sparsity_numbers(results, counts)}


def recall(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,) = sources
    policy, teacher = _teacher_policy(source), source
    rollouts, scorers = _chosen(source, choice.line), None
    if choice.teacher is not None:
        teacher = Recording(source.path, choice.teacher)
        check_model(source.origin, teacher.config, teacher.directory)
    if policy_words(source.fingerprint)[0] == "kvpop":
        scorers = getattr(source.model, SCORERS, None)
    decay = None if scorers is None else torch.stack([scorer.log_decay() for scorer in scorers])
    recalls: list[Tensor] = []

    def run(rollout: Rollout) -> None:
        tokens = [*rollout.prompt_ids, *rollout.completion_ids]
        prompt, trace = len(rollout.prompt_ids), rollout.trace
        if len(tokens) - 1 > max(prompt, policy.sinks + policy.window + policy.k):
            recalls.append(oracle_recall(teacher.model, tokens, prompt, trace, policy, decay))

    _each(source, rollouts, run)
    numbers = analysis.recall_numbers(recalls, rollouts[0].trace.global_layers)
    measured = {"k": policy.k, "sinks": policy.sinks, "window": policy.window, "teacher": _words(teacher)["model"]}
    return {**_words(source), **measured, **numbers}


def _teacher_policy(source: Recording) -> KVpopPolicyConfig:
    """Return the settings of the best possible cache with the recorded policy's budget, sinks and window."""
    name, words = policy_words(source.fingerprint)
    block = policy_settings(source.fingerprint)
    budget, (sinks, window) = block.get("budget"), kept.protected(source.fingerprint)
    if type(budget) is not int:
        raise UserError(
            f"{source.path} was sampled under {words}, which has no constant budget, so there is no top k to compare"
        )
    further = {key: block[key] for key in ("decay_every", "state_entries") if name == "kvpop" and key in block}
    # a query always sees its own token, as with a window of 1
    return KVpopPolicyConfig(budget=budget, sinks=sinks, window=max(window, 1), **further)


def attention(sources: Sequence[Recording], choice: Choice) -> Numbers:
    (source,), line, layer, head = sources, choice.line or 1, choice.layer, choice.head
    (rollout,) = _chosen(source, line)
    layers, size = rollout.trace.global_layers, cell_size(len(rollout.trace) - 1, analysis.FINEST)
    chosen = layers[len(layers) // 2] if layer is None else layer
    if chosen not in layers:
        lacks = "has a sliding window" if chosen < rollout.trace.layers else "does not exist"
        raise UserError(f"layer {chosen} {lacks}; the layers to choose from are {_listed(layers)}", "--layer")
    query_heads = source.config.num_attention_heads
    if head is not None and head >= query_heads:
        raise UserError(f"the model has {query_heads} query heads, numbered from 0", "--head")
    group = query_heads // rollout.trace.kv_heads
    heads = range(group) if head is None else [head]
    cells: list[Tensor] = []

    def take(given: LayerAttention) -> None:
        if given.index == chosen:
            cells.append(attention_cells(given, heads, analysis.FINEST))

    _each(source, [rollout], lambda rollout: hand_out(source.model, rollout, take))
    numbers = analysis.map_numbers(cells[0], rollout.trace, chosen, heads, heads[0] // group, size)
    return {**_words(source), "line": line, **numbers}


def _listed(layers: Sequence[int]) -> str:
    return f"0 to {layers[-1]}" if list(layers) == list(range(len(layers))) else ", ".join(map(str, layers))
