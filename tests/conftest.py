"""Shared fixtures, marks and the table of comparisons. tiny.py has the models, policies and prompts."""

from __future__ import annotations

import gc
import importlib.metadata
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import PreTrainedModel

from rollout import engine as engines
from rollout.hf import HFEngine
from sparse_rl.kernels.flex import flex_attend
from sparse_rl.policies import Policy
from sparse_rl.trace import SECTIONS, EvictionTrace, Section

# `nohup` makes this process and its children ignore the signal
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are collected: each pass would walk through all that has been imported
# accelerate reads PEFT's each time that it looks at a model, which is a tenth of a tiny training
importlib.metadata.metadata = cache(importlib.metadata.metadata)


@pytest.fixture(scope="session")
def new_model() -> Callable[..., PreTrainedModel]:
    return tiny.new_model


@pytest.fixture(scope="session")
def model_of() -> Callable[[str], PreTrainedModel]:
    return tiny.model_of


@pytest.fixture(scope="session")
def policy_of() -> Callable[..., Policy]:
    return tiny.policy_of


@pytest.fixture(scope="session")
def prompts_of() -> Callable[..., list[list[int]]]:
    return tiny.prompts_of


@pytest.fixture
def flex_trains(monkeypatch):
    """Let torch differentiate FlexAttention's plain operator on a CPU, which it otherwise refuses. Segments have only
    128 tokens, so that short rows have several.

    Returns one bool for each call through a view: True if the keys were sorted.
    """
    calls: list[bool] = []

    def counting(*args: Any, in_segments: bool, **kwargs: Any) -> Any:
        calls.append(in_segments)
        return flex_attend(*args, in_segments=in_segments, **kwargs)

    monkeypatch.setattr("sparse_rl.kernels.masked.flex_attend", counting)
    monkeypatch.setattr("sparse_rl.kernels.flex.segment_of", lambda _: 128)
    module = importlib.import_module("torch.nn.attention.flex_attention")  # `import` would yield the function
    monkeypatch.setattr(module, "_validate_device", lambda *_: None)
    return calls


def batch_visits(rows: Sequence[torch.Tensor], starts: Sequence[int], width: int) -> torch.Tensor:
    """Return int32 [B, maximum number of visits], with -1 after a row's last visit."""
    moved = [values + start for values, start in zip(rows, starts, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(moved, batch_first=True, padding_value=-1)


VISITS = Section(
    name="visits",
    dtype=torch.int32,
    axes=("visit",),
    joined="visit",
    check=lambda values, *_: "visits must be positions" if bool((values < 0).any()) else None,
    batch=batch_visits,
    pack=lambda documents, starts, ends: torch.cat([v + start for v, start in zip(documents, starts, strict=True)]),
)
GAINS = Section(
    name="gains",
    dtype=torch.float32,
    axes=("visit", "layer"),  # not every section is joined along its last axis
    joined="visit",
    check=lambda *_: None,
    batch=lambda rows, starts, width: batch_visits(rows, [0] * len(rows), width),
    pack=lambda documents, starts, ends: torch.cat(list(documents)),
)


@pytest.fixture
def with_visits(monkeypatch):
    """with_visits(trace, positions) -> the trace with two extra sections, which no view replays.

    visits : positions of visits, int32 [V]; gains : one number per visit and layer, float32 [V, L]
    """
    for section in (VISITS, GAINS):
        monkeypatch.setitem(SECTIONS, section.name, section)

    def add(trace: EvictionTrace, positions: Sequence[int]) -> EvictionTrace:
        visits = torch.tensor(positions, dtype=torch.int32)
        gains = torch.outer(visits, torch.arange(1, trace.layers + 1)) / 3
        return EvictionTrace(trace.evict_at, {"visits": visits, "gains": gains})

    return add


@pytest.fixture
def as_vllm(monkeypatch):
    """Replace the engine "vllm" by hf with its own weights and vllm's options; returns the log of opens and closes."""
    events: list[str] = []

    class Separate(HFEngine):
        def __init__(
            self,
            model: str | Path,
            policy: Policy,
            *,
            dtype: str = "float32",
            max_batch: int = 64,
            max_prompt: int | None = None,
            max_model_len: int | None = None,
            kv_cache_gb: float | None = None,
            gpu_memory_utilization: float = 0.3,
            tensor_parallel: int = 1,
            sleep_mode: bool = False,
            full_graphs: bool = False,
            exact: bool = True,
            progress: bool = False,
        ) -> None:
            assert isinstance(model, (str, Path))
            super().__init__(model, policy, dtype=dtype, max_batch=max_batch)
            events.append(policy.name)

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(engines, "engine_class", lambda kind: {"vllm": Separate, "hf": HFEngine}[kind])
    monkeypatch.setattr(
        engines, "_vllm_refusal", lambda config, caches, cuda: "a live module" if config is None else None
    )
    return events


TALLY = "tally"


@pytest.fixture
def tally(record_property):
    """tally(policy, compared=, ties=, gap=) adds counts to the table that is printed at the end of a run.

    compared : evictions, page choices or fitted numbers that were compared with a plain reference in tests/
    ties : differing choices that the reference decides by less than 1e-5
    gap : the largest |log p_trainer - log p_sampler|
    """

    def add(policy: str, compared: int = 0, ties: int = 0, gap: float = 0.0) -> None:
        record_property(TALLY, [policy, compared, ties, gap])

    return add


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="of the selected tests, run the K-th and each N-th after it")


@pytest.hookimpl(wrapper=True)  # before pytest selects by marks, and after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Any:
    """Mark as slow all but n cases of a test with the mark few(n). These n are evenly spread over its cases, the first
    and the last among them. Then select the part that `--part` names.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        mark = of_test[0].get_closest_marker("few")
        (count,) = mark.args
        last = len(of_test) - 1
        run = {round(i * last / max(count - 1, 1)) for i in range(count)}
        for place, item in enumerate(of_test):
            if place not in run:
                item.add_marker("slow")
    result = yield
    if part := config.getoption("part"):
        first, step = map(int, part.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items, 1) if (i - first) % step])
        items[:] = items[first - 1 :: step]
    return result


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from garbage collection, of which Trainer and vLLM order much."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def survivors_are_set_aside() -> None:
    """Exclude what is alive from garbage collection before each module: a pass over all of it takes up to 0.5 s."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report a leak when the interpreter ends


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: policy, comparisons, ties and the largest gap, over all tests that passed."""
    totals: dict[str, list[float]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in getattr(report, "user_properties", []):
            if name == TALLY and report.when == "call":
                policy, compared, ties, gap = value
                have = totals.setdefault(policy, [0, 0, 0.0])
                totals[policy] = [have[0] + compared, have[1] + ties, max(have[2], gap)]
    if totals:
        terminalreporter.section("compared with plain references; replay gap")
        terminalreporter.line("| policy | compared | ties | largest gap |")
        terminalreporter.line("|---|---|---|---|")
        for policy in sorted(totals):
            compared, ties, gap = totals[policy]
            terminalreporter.line(f"| {policy} | {compared:,} | {ties} | {gap:.1e} |")
