"""A trace is accepted (when it is created, loaded and replayed) if and only if a sampler can have recorded it.

`possible` decides this number by number, from the definitions in docs/traces.md. Records are drawn at random by
following a sampler, then changed at random; the package must accept exactly those that `possible` accepts.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import Rollout
from sparse_rl.attention.interface import NO_MASK
from sparse_rl.attention.logprobs import replay_logprobs
from sparse_rl.attention.views import make_view
from sparse_rl.methods.pages.view import PagedView
from sparse_rl.trace import NEVER, EvictionTrace, TraceError, batch_traces, declared, load_traces, pack_traces
from sparse_rl.trace.files import write_sections

LAYERS, HEADS = 2, 2
DOCS = Path(__file__).parents[1] / "docs/traces.md"
Sections = dict[str, torch.Tensor]


def tensor(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def evicted(rng: random.Random, prompt: int, length: int) -> Sections:
    def at(token: int) -> int:
        return rng.choice([NEVER, *range(token + 1, length - 1)])

    return {"evict_at": tensor([[[at(t) for t in range(length)] for _ in range(HEADS)] for _ in range(LAYERS)])}


def compacted(rng: random.Random, prompt: int, length: int) -> Sections:
    end = rng.randint(1, prompt)
    late = end > length - 2

    def at(token: int) -> int:
        return end if token < end and not late and rng.random() < 0.5 else NEVER

    evict_at = tensor([[[at(t) for t in range(length)] for _ in range(HEADS)] for _ in range(LAYERS)])
    return {"evict_at": evict_at, "compacted_at": tensor([end])}


def context(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record of a compacted context whose reference queries are recorded. Only tokens of its parts leave."""
    sections = compacted(rng, prompt, length)
    end = int(sections["compacted_at"])
    bounds = sorted(rng.sample(range(end + 1), rng.randint(2, min(4, end + 1))))
    evict_at = sections["evict_at"]
    evict_at[..., : bounds[0]] = evict_at[..., bounds[-1] :] = NEVER
    parts = range(len(bounds) - 1)
    asked = [[part, rng.randrange(end), rng.randint(-1, 2)] for part in parts for _ in range(rng.randint(1, 3))]
    settings = tensor([0.1, rng.randint(0, 1), *rng.choice([(0, 1), (1, 0), (1, 1)])], torch.float64)
    return {
        **sections,
        "compacted_with": settings,
        "compacted_parts": tensor(bounds),
        "compacted_queries": tensor(rng.sample(asked, len(asked))),
    }


def refitted(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record of Attention Matching, with the number of entries between sinks and window that each compaction
    keeps; under a budget that grows, the number is 0.
    """
    sinks, window, kept_count, period = rng.randint(0, 2), rng.randint(0, 3), rng.randint(1, 3), rng.randint(1, 4)
    budget, grows = sinks + window + kept_count, rng.random() < 0.3
    times = [seen for seen in range(max(prompt, budget + period), length - 1, period)]
    evict_at = torch.full((LAYERS, HEADS, length), NEVER, dtype=torch.int32)
    for row in evict_at.flatten(0, 1):
        for place, now in enumerate(times):
            middle = [t for t in range(sinks, now - window) if row[t] == NEVER]
            for token in rng.sample(middle, len(middle) - kept_count - (place if grows else 0)):
                row[token] = now
    most = times[0] if times else 9
    queries = rng.choice([rng.randint(1, most), most, most])
    settings = tensor([sinks, window, 0 if grows else kept_count, queries, 0.1, rng.randint(0, 1), 0], torch.float64)
    return {"evict_at": evict_at, "refit_with": settings, "refit_at": tensor(times)}


def paged(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record of clustered attention in all layers or in one of them."""
    size, window, sinks, most = rng.randint(1, 4), rng.randint(0, 4), rng.randint(0, 2), rng.randint(0, 3)
    uniform, layers = rng.randint(0, 1), rng.choice([[0], [1], [0, 1]])
    sections = evicted(rng, prompt, length)
    sections["evict_at"][layers] = NEVER
    sections["paged_with"] = tensor([size, window, sinks, most, 1, rng.randint(0, 1), uniform, 1])
    if len(layers) < LAYERS or rng.random() < 0.2:
        sections["paged_layers"] = tensor(layers)
    closed_at: list[int] = []
    opened = torch.full((LAYERS, HEADS, length, most), -1, dtype=torch.int16)
    for query in range(prompt, length - 1):
        while sinks + (len(closed_at) + 1) * size + window <= query:
            closed_at.append(query)
        for layer in layers:
            for head in range(HEADS):
                chosen = rng.sample(range(len(closed_at)), rng.randint(0, min(most, len(closed_at))))
                opened[layer, head, query, : len(chosen)] = tensor(chosen, torch.int16)
    sections |= {"closed_at": tensor(closed_at), "opened": opened}
    if not uniform:
        pi = torch.zeros(LAYERS, HEADS, length)
        inside = slice(sinks, sinks + size * len(closed_at))
        shares = torch.tensor([rng.random() for _ in range(LAYERS * HEADS * size * len(closed_at))])
        shares = shares.view(LAYERS, HEADS, -1, size).softmax(-1).flatten(2)
        pi[layers, :, inside] = shares[layers]
        sections["pi"] = pi
    return sections


def routed(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record of a model with 5 experts in both layers or in one of them."""
    choices = 2
    experts = torch.full((LAYERS, length, choices), -1, dtype=torch.int16)
    for layer in rng.choice([[0], [1], [0, 1]]):
        for token in range(length - 1):
            experts[layer, token] = tensor(rng.sample(range(5), choices), torch.int16)
    return {**evicted(rng, prompt, length), "routed": experts}


def supported(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record with supports over up to 64 tokens: W is 1 or 2, so that some supports are bits."""
    words = rng.randint(1, 2)
    size_of = {token: rng.choice([0, 1, 1, 2, 3, 9]) for token in range(prompt, length)}
    supports = [sorted(rng.sample(range(32 * words), size)) for size in size_of.values()]
    bits = [
        [sum(1 << (i % 32) for i in ids if i // 32 == w) for w in range(words)] for ids in supports if len(ids) > words
    ]
    return {
        **evicted(rng, prompt, length),
        "support_sizes": tensor([0] * prompt + list(size_of.values())),
        "support": tensor([i for ids in supports if len(ids) <= words for i in ids]),
        "support_bits": torch.tensor(bits, dtype=torch.int64).view(-1, words).to(torch.int32),
    }


def windowed(rng: random.Random, prompt: int, length: int) -> Sections:
    """Return a record of any other kind, beside one or two layers with sliding windows, before, between or after it."""
    kind = rng.choice([evicted, compacted, context, refitted, paged, supported])
    part = kind(rng, prompt, length)
    windows = [0] * LAYERS
    for _ in range(rng.randint(1, 2)):
        windows.insert(rng.randint(0, len(windows)), rng.choice([1, 2, 3, length - 1, length + 5]))
    policy_layers = iter(part["evict_at"])
    layers = []
    for window in windows:
        leaves = [t + window if window and t + window <= length - 2 else NEVER for t in range(length)]
        layers.append(tensor([leaves] * HEADS) if window else next(policy_layers))
    return {**part, "evict_at": torch.stack(layers), "windowed": tensor(windows)}


SUPPORTS = {"support_sizes", "support", "support_bits"}
EMPTY = {"refit_at", "closed_at", "opened", *SUPPORTS}  # sections that may hold nothing
CONTEXT = {"compacted_with", "compacted_parts", "compacted_queries"}
KINDS = {"evicted": evicted, "compacted": compacted, "context": context, "refitted": refitted, "paged": paged}
KINDS |= {"routed": routed, "supported": supported, "windowed": windowed}


def draw_record(kind: str, seed: int) -> tuple[Sections, int]:
    """Return (sections, number of tokens of the prompt)."""
    rng = random.Random(f"{kind} {seed}")
    length = rng.randint(2, 18)
    prompt = rng.randint(1, length - 1)
    return KINDS[kind](rng, prompt, length), prompt


def possible(sections: Mapping[str, torch.Tensor], prompt: int) -> bool:
    """Return True if a sampler can have recorded these sections; they are checked one number at a time."""
    names, further = set(sections), {name: values.tolist() for name, values in sections.items()}
    evict_at = further["evict_at"]
    if "windowed" in names:
        windows = further["windowed"]
        if len(windows) != len(evict_at) or min(windows) < 0 or not any(windows) or all(windows):
            return False
        for window, layer in zip(windows, evict_at, strict=True):
            for row in layer if window else ():
                leaves = [t + window if t + window <= len(row) - 2 else NEVER for t in range(len(row))]
                if row != leaves:
                    return False
        part = {name: values for name, values in sections.items() if name != "windowed"}
        part["evict_at"] = torch.stack(
            [x for x, window in zip(sections["evict_at"], windows, strict=True) if not window]
        )
        return possible(part, prompt)
    length = len(evict_at[0][0])
    if "opened" in names and len(further["opened"]) != len(evict_at):
        return False
    if "pi" in names and len(further["pi"]) != len(evict_at):
        return False
    queries = range(length - 1)
    tokens = range(length)
    heads = [row for layer in evict_at for row in layer]
    if not all(at == NEVER or (at in queries and at > token) for row in heads for token, at in enumerate(row)):
        return False
    groups = [{"refit_at", "refit_with"}, {"paged_with", "closed_at", "opened"}]
    if any(names & group and not group <= names for group in groups):
        return False
    if names & {"pi", "paged_layers"} and "opened" not in names:
        return False
    if "compacted_at" in names:
        (end,) = further["compacted_at"]
        if not 1 <= end <= prompt or {at for row in heads for at in row} - {end, NEVER}:
            return False
    if names & CONTEXT and (not CONTEXT | {"compacted_at"} <= names or not possible_context(further)):
        return False
    if "refit_at" in names:
        sinks, window, kept_count, asked, ridge, *flags = further["refit_with"]
        times = further["refit_at"]
        if any(not 0 <= n < NEVER or n != int(n) for n in (sinks, window, kept_count, asked)) or not (
            asked and ridge > 0
        ):
            return False
        least: float = sinks + window + 1  # number of entries that a compaction leaves, if the budget grows
        if any(flag not in (0, 1) for flag in flags) or times != sorted(set(times)):
            return False
        if any(now not in queries or now < max(prompt, asked) for now in times):
            return False
        if {at for row in heads for at in row} - {*times, NEVER}:
            return False
        for now in times:
            counts = set[float]()
            for row in heads:
                held = [t for t in tokens if t < now < row[t]]
                around = {t for t in tokens if t < now and (t < sinks or t >= now - window)}
                if not around <= set(held):
                    return False
                counts.add(len(held))
            expected = {sinks + window + kept_count} if kept_count else {max([least, *counts])}
            if counts != expected:
                return False
            (least,) = counts
    if names & SUPPORTS and not names >= SUPPORTS:
        return False
    if names & SUPPORTS and not possible_supports(further, prompt, sections["support_bits"].shape[1]):
        return False
    if "routed" in names and not all(possible_experts(layer, length) for layer in further["routed"]):
        return False
    return "opened" not in names or possible_pages(further, prompt, length)


def possible_supports(further: dict[str, Any], prompt: int, words: int) -> bool:
    """Return True if each drawn token has as many tokens in its support as its size says."""
    sizes, ids, bits = (further[name] for name in ("support_sizes", "support", "support_bits"))
    if len(sizes) != len(further["evict_at"][0][0]) or any(sizes[:prompt]) or any(size < 0 for size in sizes):
        return False
    ids, bits = list(ids), list(bits)
    for size in filter(None, sizes):
        if size > words:
            support = sum(bin(word & 0xFFFFFFFF).count("1") for word in bits.pop(0)) if bits else -1
            if support != size:
                return False
        else:
            support, ids = ids[:size], ids[size:]
            if len(support) != size or support != sorted(set(support)) or not set(support) <= set(range(32 * words)):
                return False
    return not ids and not bits


def possible_experts(by_token: list[list[int]], length: int) -> bool:
    """Return True if a layer has distinct experts for every token except the last, or none at all."""
    if all(expert == -1 for experts in by_token for expert in experts):
        return True
    *fed, last = by_token
    return set(last) == {-1} and all(len(set(row)) == len(row) and min(row) >= 0 for row in fed)


def possible_context(further: dict[str, Any]) -> bool:
    (end,), bounds = further["compacted_at"], further["compacted_parts"]
    ridge, *flags = further["compacted_with"]
    if not 0 < ridge < float("inf") or any(flag not in (0, 1) for flag in flags) or not any(flags[1:]):
        return False
    if len(bounds) < 2 or bounds != sorted(set(bounds)) or bounds[0] < 0 or bounds[-1] > end:
        return False
    for row in (row for layer in further["evict_at"] for row in layer):
        if any(at != NEVER and not bounds[0] <= token < bounds[-1] for token, at in enumerate(row)):
            return False
    parts = range(len(bounds) - 1)
    for part, token, head in further["compacted_queries"]:
        if part not in parts or not 0 <= token < end or not -1 <= head < NEVER:
            return False
    return set(parts) == {part for part, _, _ in further["compacted_queries"]}


def possible_pages(further: dict[str, Any], prompt: int, length: int) -> bool:
    size, window, sinks, most, *flags = further["paged_with"]
    if (
        size < 1
        or min(window, sinks, most) < 0
        or max(size, window, sinks, most) >= NEVER
        or any(flag not in (0, 1) for flag in flags)
    ):
        return False
    if bool(flags[2]) == ("pi" in further):
        return False
    layers = further.get("paged_layers", list(range(LAYERS)))
    if not layers or layers != sorted(set(layers)) or not set(layers) <= set(range(LAYERS)):
        return False
    closed_at = []
    for query in range(prompt, length - 1):
        while sinks + (len(closed_at) + 1) * size + window <= query:
            closed_at.append(query)
    if further["closed_at"] != closed_at:
        return False
    inside = {sinks + place: place // size for place in range(size * len(closed_at))}
    for layer in range(LAYERS):
        for head in range(HEADS):
            if layer in layers and any(at != NEVER for at in further["evict_at"][layer][head]):
                return False
            for query, places in enumerate(further["opened"][layer][head]):
                chosen = [page for page in places if page != -1]
                closed = [p for p, at in enumerate(closed_at) if at <= query < length - 1 and layer in layers]
                if len(places) != most or len(chosen) != len(set(chosen)) or not set(chosen) <= set(closed):
                    return False
            if "pi" in further:
                sums: Counter[int] = Counter()
                for token, share in enumerate(further["pi"][layer][head]):
                    if not 0 <= share <= 1 or (share and (token not in inside or layer not in layers)):
                        return False
                    sums[inside.get(token, -1)] += share
                if layer in layers and any(abs(sums[page] - 1) > 1e-4 for page in range(len(closed_at))):
                    return False
    return True


def accepted(sections: Sections, prompt: int | None) -> bool:
    """Return True if the package accepts the record; None means that the prompt's length is not known."""
    try:
        further = {name: values for name, values in sections.items() if name != "evict_at"}
        EvictionTrace(sections["evict_at"], further).check(prompt)
    except TraceError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_a_sampler_are_accepted(kind, tmp_path):
    for seed in range(300):
        sections, prompt = draw_record(kind, seed)
        assert possible(sections, prompt), seed
        assert accepted(sections, prompt), seed
        if seed % 30 == 0:
            write_sections(tmp_path / "t.safetensors", [sections], None)
            (trace,) = load_traces(tmp_path / "t.safetensors")
            batch_traces([trace], [1], len(trace) + 2)


def with_one_change(sections: Sections, rng: random.Random) -> Sections:
    """Return the record with one section changed: one number replaced, two numbers swapped, two numbers shifted by +1
    and -1, or the section made longer, made shorter, or removed.
    """
    name = rng.choice([name for name, values in sections.items() if values.numel()])
    values = sections[name].clone()
    kind = rng.choice(["set", "set", "set", "swap", "trade", "longer", "shorter", "gone"])
    numbers = values.view(-1)
    place, other_place = rng.randrange(len(numbers)), rng.randrange(len(numbers))
    near = int(numbers[place]) + rng.choice([-1, 1])
    if kind == "set":
        candidates = [near, -1, 0, 1, rng.randint(2, 18), len(numbers), NEVER, int(numbers[other_place])]
        numbers[place] = rng.choice(
            [n for n in candidates if abs(n) < 2 ** (15 if values.dtype == torch.int16 else 31) - 1]
        )
    elif kind == "swap":
        numbers[[place, other_place]] = numbers[[other_place, place]]
    elif kind == "trade":
        numbers[place] += 1
        numbers[other_place] -= 1
    elif values.ndim > 1 or name == "evict_at" or kind == "gone":
        return {key: x for key, x in sections.items() if key != name or name == "evict_at"}
    else:
        values = torch.cat([values, values[-1:] + rng.randint(0, 2)]) if kind == "longer" else values[:-1]
    return {**sections, name: values}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(2)
def test_a_changed_record_is_accepted_if_and_only_if_it_is_possible(kind):
    """In every section, at least 20 changes must make it impossible."""
    counts: Counter[tuple[str, bool]] = Counter()
    for seed in range(2500):
        sections, prompt = draw_record(kind, seed % 250)
        rng = random.Random(f"changed {seed}")
        altered = with_one_change(sections, rng)
        for near in (prompt - 1, prompt + 1):
            assert accepted(sections, near) == possible(sections, near), (kind, seed, near)
        where = [name for name in sections if name not in altered or not torch.equal(altered[name], sections[name])]
        well_formed = all(altered[name].numel() or name in EMPTY for name in altered)
        expected = well_formed and possible_or_not(altered, prompt)
        assert accepted(altered, prompt) == expected, (kind, seed, where, altered)
        for name in where:
            counts[name, expected] += 1
    for name in drawn_names(kind):
        assert counts[name, False] >= 20, (name, counts)
    assert counts["evict_at", True] >= 20 or kind != "evicted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_without_a_prompt_length_is_accepted_if_it_fits_some_prompt(kind):
    counts: Counter[bool] = Counter()
    for seed in range(300):
        altered = with_one_change(draw_record(kind, seed % 100)[0], random.Random(f"unknown {seed}"))
        prompts = range(1, altered["evict_at"].shape[-1])
        well_formed = all(altered[name].numel() or name in EMPTY for name in altered)
        expected = well_formed and any(possible_or_not(altered, prompt) for prompt in prompts)
        assert accepted(altered, None) == expected, (kind, seed, altered)
        counts[expected] += 1
    assert min(counts[False], counts[True]) >= 20


def possible_or_not(sections: Sections, prompt: int) -> bool:
    """Return the result of `possible`, also for settings of another length."""
    numbers = {"refit_with": 7, "paged_with": 8, "compacted_at": 1, "compacted_with": 4}
    if any(name in sections and len(sections[name]) != count for name, count in numbers.items()):
        return False
    return possible(sections, prompt)


def drawn_names(kind: str) -> set[str]:
    return {name for seed in range(250) for name in draw_record(kind, seed)[0]}


def example(**settings: int) -> tuple[Sections, int]:
    """Return a record of 14 tokens with a prompt of 4: pages of 2 tokens after a sink, which close 2 tokens later, at
    5, 7, 9 and 11.
    """
    opened = torch.full((LAYERS, HEADS, 14, 2), -1, dtype=torch.int16)
    opened[..., 9:13, 0] = 1
    pi = torch.zeros(LAYERS, HEADS, 14)
    pi[..., 1:9] = tensor([0.25, 0.75] * 4, torch.float32)
    return {
        "evict_at": torch.full((LAYERS, HEADS, 14), NEVER, dtype=torch.int32),
        "paged_with": tensor([2, 2, 1, 2, 1, 1, 0, 1]),
        "closed_at": tensor([5, 7, 9, 11]),
        "opened": opened,
        "pi": pi,
    }, 4


def planted(name: str, place: tuple | int, value: float) -> Callable[[Sections], None]:
    def change(sections: Sections) -> None:
        sections[name][place] = value

    return change


IMPOSSIBLE: dict[str, tuple[Callable[[Sections], Any], str]] = {
    "a page of the future": (planted("opened", (0, 1, 6, 0), 3), r"opened\[0, 1, 6\] is page 3, but only 1 pages"),
    "a page opened by a query of the prompt": (planted("opened", (0, 0, 3, 0), 0), "is page 0, but only 0 pages"),
    "a page opened by the last token": (planted("opened", (0, 0, 13, 0), 0), "is page 0, but only 0 pages"),
    "a page beyond the last": (planted("opened", (0, 0, 12, 0), 99), "is page 99, but only 4 pages"),
    "a page twice": (planted("opened", (0, 0, 12), 1), "a page twice for one query"),
    "a page that closes late": (planted("closed_at", 1, 8), "is wrong: pages of 2 tokens after 1 sinks close"),
    "a page that closes in the prompt": (planted("closed_at", 0, 3), "is wrong: pages of 2 tokens"),
    "a token of a page that leaves": (
        planted("evict_at", (0, 0, 3), 9),
        "an eviction in a layer whose tokens are paged",
    ),
    "a sink that is evicted": (planted("evict_at", (1, 1, 0), 9), "an eviction in a layer whose tokens are paged"),
    "pi of zeros": (lambda sections: sections["pi"].zero_(), "sums to 0, not 1"),
    "pi twice as large": (lambda sections: sections["pi"][..., 1:3].fill_(1.0), "sums to 2, not 1"),
    "another window": (planted("paged_with", 1, 1), "is wrong: pages of 2 tokens after 1 sinks close 1 tokens"),
    "no paged_with": (lambda sections: sections.pop("paged_with"), "also needs paged_with"),
    "no opened": (lambda sections: sections.pop("opened"), "also needs opened"),
    "no closed_at": (lambda sections: sections.pop("closed_at"), "also needs closed_at"),
}


def split(sections: Sections) -> tuple[torch.Tensor, Sections]:
    return sections["evict_at"], {name: values for name, values in sections.items() if name != "evict_at"}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_pages_are_refused(name, tmp_path, model_of):
    """When a trace is created, loaded, and replayed after its tensors were changed in place."""
    change, message = IMPOSSIBLE[name]
    sections, prompt = example()
    before = EvictionTrace(*split(sections))
    sequence = SimpleNamespace(prompt_ids=[3] * prompt, completion_ids=[5] * (14 - prompt), trace=before)
    model = model_of("qwen3")
    assert replay_logprobs(model, [sequence])[0].shape == (10,)  # control
    change(sections)
    with pytest.raises(TraceError, match=message):
        EvictionTrace(*split(sections))
    path = tmp_path / "t.safetensors"
    write_sections(path, [sections], None)
    with pytest.raises(TraceError, match=message):
        load_traces(path)
    if name.startswith("no "):
        with pytest.raises(TraceError, match=f"PagedView cannot replay a trace without the section '{name[3:]}'"):
            PagedView({key: values[None] for key, values in sections.items()}, "cpu")
        return
    for replayed in (
        lambda: replay_logprobs(model, [sequence]),
        lambda: pack_traces([before]),
        lambda: make_view([before], [0], 14, "cpu"),
        lambda: Rollout(sequence.prompt_ids, sequence.completion_ids, [0.0] * 10, [0.0] * 10, before, "length"),
    ):
        with pytest.raises(TraceError, match=message):
            replayed()


def test_a_record_that_does_not_fit_the_prompt_is_refused_in_replay(model_of):
    """Pages that close at 5, 7, 9 and 11 fit prompts of 4 or 5 tokens, but not of 6 or 9."""
    sections, prompt = example()
    trace = EvictionTrace(*split(sections))
    for tokens, refused in ((prompt, False), (5, False), (6, True), (9, True)):
        sequence = SimpleNamespace(prompt_ids=[3] * tokens, completion_ids=[5] * (14 - tokens), trace=trace)
        if refused:
            with pytest.raises(TraceError, match="is wrong: pages of 2 tokens"):
                replay_logprobs(model_of("qwen3"), [sequence])
        else:
            replay_logprobs(model_of("qwen3"), [sequence])


def test_control_a_page_that_contains_a_later_token_leaks_this_token(model_of):
    """The reason for the check of pages: the log-probs at query 8 would depend on token 9 (here 20 or 21)."""
    model = model_of("qwen3")

    def logits_at_query_8(token_9: int, future: bool) -> torch.Tensor:
        sections, _ = example()
        if future:
            # tokens 7 and 8 are in the page, and query 8 reads both anyway; token 9 comes later
            sections["opened"][:, :, 8, 0] = 3
            sections["paged_with"][2] = 2
        trace = EvictionTrace(*split(sections), validate=False)
        ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 11, token_9, 13, 14, 15, 16]])
        view = make_view([trace], [0], 14, "cpu")
        with torch.no_grad():
            return model(input_ids=ids, attention_mask=NO_MASK, kv_view=view, use_cache=False).logits[0, 8]

    assert torch.equal(logits_at_query_8(20, False), logits_at_query_8(21, False))
    assert not torch.equal(logits_at_query_8(20, True), logits_at_query_8(21, True))


def test_the_drawn_records_cover_every_section():
    assert set(declared()) == {name for kind in KINDS for name in drawn_names(kind)}


def test_impossible_experts_are_refused():
    """Experts of the last token, which is never fed, and a layer without experts for a single token are refused."""
    sections = next(s for s, _ in (draw_record("routed", seed) for seed in range(99)) if len(s["routed"][0]) > 4)
    layer = int((sections["routed"] >= 0).any(-1).any(-1).nonzero()[0])

    def with_token(token: int, experts: list[int]) -> Sections:
        changed = sections["routed"].clone()
        changed[layer, token] = tensor(experts, torch.int16)
        return {**sections, "routed": changed}

    for changed, message in (
        (with_token(-1, [0, 1]), "routed has experts for the last token, which is never fed"),
        (with_token(2, [-1, -1]), f"routed has no experts for token 2 of layer {layer}, although"),
    ):
        assert not possible(changed, 1)
        with pytest.raises(TraceError, match=message):
            EvictionTrace(changed["evict_at"], {"routed": changed["routed"]})


def test_files_of_the_writer_in_the_docs_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(import hashlib.*?)```", DOCS.read_text(), flags=re.S)
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    (trace,) = load_traces("traces.safetensors", {"policy": "mine"})
    assert (trace.evict_at < NEVER).nonzero().tolist() == [[0, 0, 1]]
    assert trace.evict_at[0, 0, 1] == 4
    assert trace.shape == (1, 2, 6)
    for kind in KINDS:
        groups: dict[tuple, list[Sections]] = {}
        fixed = {"evict_at": 0, "opened": 3, "support_bits": 1}  # the axes that the sequences of a file have in common
        for seed in range(60):
            sections, _ = draw_record(kind, seed)
            shape = [sections[name].shape[axis] for name, axis in fixed.items() if name in sections]
            groups.setdefault((*sections, *shape), []).append(sections)
        for records in groups.values():
            joined = {
                name: ([row[name].numpy() for row in records], declared()[name].joined_axis) for name in records[0]
            }
            namespace["write_traces"]("other.safetensors", joined, {"policy": "ä"})
            for row, loaded in zip(records, load_traces("other.safetensors"), strict=True):
                assert all(torch.equal(values, loaded.sections[name]) for name, values in row.items())


def test_files_of_format_version_2_load_unless_they_have_pages(tmp_path, monkeypatch):
    """Version 2 had no section closed_at."""
    path, (plain, _), (pages, _) = tmp_path / "t.safetensors", draw_record("refitted", 3), example()
    monkeypatch.setattr("sparse_rl.trace.files.FORMAT_VERSION", 2)
    write_sections(path, [plain], None)
    (loaded,) = load_traces(path)
    assert all(torch.equal(values, loaded.sections[name]) for name, values in plain.items())
    write_sections(path, [{name: values for name, values in pages.items() if name != "closed_at"}], None)
    with pytest.raises(TraceError, match=r"has pages in format version 2, which mixed .*; sample again$"):
        load_traces(path)
    monkeypatch.setattr("sparse_rl.trace.files.FORMAT_VERSION", 4)
    write_sections(path, [plain], None)
    monkeypatch.undo()
    with pytest.raises(TraceError, match="has format version '4'; the supported versions: 2 and 3"):
        load_traces(path)
