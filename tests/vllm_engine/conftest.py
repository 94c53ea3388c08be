"""Fixtures of the vLLM engine's tests, which are skipped if vLLM is not installed. Heads have size 32, as vLLM's CPU
kernel requires.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tiny import directory_of

from rollout import make_engine

OPENED: list[int] = []  # an entry for each engine that this process has had, except those in separate processes
HELD: list[tuple[Any, Any]] = []  # the open engine, and the arguments of one that is shared


@pytest.fixture(scope="session", autouse=True)
def vllm_is_here() -> Iterator[None]:
    """vLLM looks at each new architecture in a process of its own, so that CUDA stays untouched: 8 s on a CPU."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()):
        yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def closed_at_last() -> Iterator[None]:
    yield
    close()


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set variables with which a tiny engine starts quickly, and restore the environment that vLLM changes."""
    if "open_engine" not in request.fixturenames:
        close()
    fast = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    with mock.patch.dict(os.environ, fast), mock.patch.object(gc, "unfreeze"):  # as an engine does at its end
        yield


@contextmanager
def quickly(engines_before: int) -> Iterator[None]:
    """Skip work at an engine's start and end that a process needs once: freezing garbage, finding vLLM's kernels."""
    if engines_before == 1:
        gc.collect()
        gc.freeze()
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"), ExitStack() as stack:
        if engines_before:
            stack.enter_context(mock.patch("vllm.triton_utils.dispatcher.register_kernels"))
        yield


def close() -> None:
    while HELD:
        engine = HELD.pop()[1]
        with quickly(len(OPENED)):
            engine.close()
        if not engine.separate:
            OPENED.append(1)


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Any]]:
    """open_engine(policy, model="qwen2", shared=False, **options) -> a vllm engine, open until the next call or the
    test's end. A `shared` engine stays open for the next tests of the module that ask for the same."""

    def make(policy: Any, model: str | Path = "qwen2", shared: bool = False, **options: Any) -> Any:
        wanted = (str(policy), model, str(options)) if shared else None
        if not HELD or wanted is None or HELD[0][0] != wanted:
            close()
            folder = model if isinstance(model, Path) else directory_of(model)
            defaults = {"kv_cache_gb": 0.03, "max_batch": 16, "max_model_len": 1024}
            with quickly(len(OPENED)):
                engine = make_engine("vllm", model=folder, policy=policy, **{**defaults, **options})
            HELD.append((wanted, engine))
        return HELD[0][1]

    yield make
    if HELD and HELD[0][0] is None:
        close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect the command lines that `serve` would execute."""
    from rollout.vllm import serve

    command_lines: list[list[str]] = []
    monkeypatch.setattr(serve, "_become", command_lines.append)
    return command_lines
