"""A call of a user's reward returns checked numbers, and changes nothing in the process that called it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rewards import own
from sparse_rl.errors import UserError
from sparse_rl.recipe.run import rewards_of

COMPLETIONS = [f"completion {i}" for i in range(8)]
EARLIER = os._exit


@pytest.fixture
def bounded(monkeypatch) -> Callable[[Callable], Callable]:
    """bounded(function) returns the function as a recipe gets it, under the name `mine`."""

    def make(function: Callable) -> Callable:
        monkeypatch.setitem(sys.modules, "users_rewards", module := ModuleType("users_rewards"))
        module.mine = function
        function.__name__ = "mine"
        return rewards_of(["users_rewards:mine"], "rewards")[0][0]

    return make


def values(*first: Any) -> Callable:
    return lambda completions, **_: [*first, *[1.0] * (len(completions) - len(first))]


ACCEPTED = [True, np.float32(1), np.bool_(True), np.int64(1), torch.tensor(1.0), Fraction(1), Decimal(1), -1e15, None]
REFUSED = [
    *(float("nan"), float("inf"), -float("inf"), 3e38, -1e16, 10**400, np.float16("inf"), torch.tensor(float("nan"))),
    *(Decimal("sNaN"), 1j, "1.0", b"1", [1.0], torch.zeros(2), object()),
]


@pytest.mark.parametrize("value", ACCEPTED, ids=repr)
def test_numbers_of_every_kind_are_accepted(bounded, value):
    assert bounded(values(0.5, value))(completions=COMPLETIONS)[:2] == [0.5, None if value is None else float(value)]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_a_value_that_is_no_finite_number_is_refused_with_function_row_and_value(bounded, value):
    with pytest.raises(
        UserError, match=r"^rewards: mine returned .* in row 2 of 8; a reward is a number from"
    ) as caught:
        bounded(values(0.5, value))(completions=COMPLETIONS)
    assert " ".join(repr(value)[:60].split()) in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for 8 completions"),
        (range(9), "returned 9 values for 8 completions"),
        (1.0, "raised TypeError: 'float' object is not iterable"),
        (None, "raised TypeError: 'NoneType' object is not iterable"),
        ("01010101", "raised TypeError: a list of numbers is needed, not a str"),
        (dict.fromkeys(range(8), 1.0), "raised TypeError: a list of numbers is needed, not a dict"),
        (set(range(8)), "raised TypeError: a list of numbers is needed, not a set"),
    ],
)
def test_other_results_are_refused(bounded, returned, message):
    with pytest.raises(UserError, match=f"^rewards: mine {message}"):
        bounded(lambda completions, **_: returned)(completions=COMPLETIONS)


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array, torch.tensor])
def test_every_sequence_of_numbers_is_accepted(bounded, kind):
    numbers = [i / 8 for i in range(8)]
    assert bounded(lambda completions, **_: kind(numbers))(completions=COMPLETIONS) == numbers


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a\nb\n\n c"), "ValueError: a b c"),
        (KeyError("answer"), "KeyError: 'answer'"),
        (SystemExit(0), "SystemExit: 0"),
        (Unprintable(), "exception str() failed"),
        (asyncio.CancelledError(), "CancelledError"),
        (ExceptionGroup("two", [ValueError("one"), OSError("other")]), "ExceptionGroup: two"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_exception_becomes_one_line(bounded, error, text):
    def raises(completions, **_):
        raise error

    with pytest.raises(UserError, match=f"^rewards: mine raised .*{re.escape(text)}") as caught:
        bounded(raises)(completions=COMPLETIONS)
    assert "\n" not in str(caught.value)


def test_an_interrupt_stays_an_interrupt(bounded):
    def interrupts(completions, **_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bounded(interrupts)(completions=COMPLETIONS)


def test_os_exit_is_an_error_but_ends_a_child(bounded):
    """os._exit raises in the process of the run. In a child of the function it ends the child, with its status."""
    statuses = []

    def exits(completions, **_):
        child = multiprocessing.get_context("fork").Process(target=os._exit, args=(5,))
        child.start()
        child.join()
        statuses.append(child.exitcode)
        os._exit(0)

    with pytest.raises(UserError, match=r"mine raised SystemExit: os\._exit\(0\)"):
        bounded(exits)(completions=COMPLETIONS)
    assert statuses == [5]
    assert os._exit is EARLIER


ALTERED = {  # getter, and a change that the getter sees
    "working directory": (os.getcwd, lambda: os.chdir("/")),
    "new variable": (lambda: dict(os.environ), lambda: os.environ.update(RANK="1")),
    "variable": (lambda: dict(os.environ), lambda: os.environ.clear()),
    "alarm": (lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, lambda: signal.alarm(1)),
    "alarm's handler": (
        lambda: signal.getsignal(signal.SIGALRM),
        lambda: signal.signal(signal.SIGALRM, signal.SIG_IGN),
    ),
    "logging": (lambda: logging.root.manager.disable, lambda: logging.disable()),
    "warnings": (lambda: list(warnings.filters), lambda: warnings.simplefilter("error")),
    "NumPy's errors": (np.geterr, lambda: np.seterr(all="raise")),
    "grad mode": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(3)),
    "precision": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "determinism": (torch.get_deterministic_debug_mode, lambda: torch.use_deterministic_algorithms(True)),
    "torch's seed": (torch.initial_seed, lambda: torch.manual_seed(12345)),
    "stdout": (lambda: sys.stdout, lambda: setattr(sys, "stdout", None)),
    "file 2": (lambda: os.fstat(2).st_ino, lambda: os.dup2(os.open("/dev/null", os.O_WRONLY), 2)),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_global_setting_is_restored_after_the_call(bounded, name):
    """Control: within the call, the change takes effect."""
    (read, change), within = ALTERED[name], []

    def alters(completions, **_):
        change()
        within.append(read())
        return [1.0] * len(completions)

    reward, before = bounded(alters), read()
    assert reward(completions=COMPLETIONS) == [1.0] * 8
    assert read() == before
    assert within != [before]


@pytest.mark.parametrize(
    "close",
    [
        lambda: sys.stdout.close(),
        lambda: sys.stderr.close(),
        lambda: sys.stdout.buffer.close(),
        lambda: sys.stdout.detach(),
        lambda: sys.__stdout__.close(),
        lambda: os.close(1),
    ],
)
def test_a_closed_stream_is_open_after_the_call(bounded, close, capfd):
    def closes(completions, **_):
        print("within")
        close()
        return [1.0] * len(completions)

    bounded(closes)(completions=COMPLETIONS)
    os.write(1, b"file\n")
    print("stream", flush=True)
    print("error", file=sys.stderr, flush=True)
    assert {"within", "file", "stream"} == set(capfd.readouterr().out.split())


@pytest.mark.parametrize(
    ("seed", "draw"),
    [
        (random.seed, random.random),
        (np.random.seed, np.random.random),
        (torch.manual_seed, lambda: float(torch.rand(()))),
    ],
    ids=["python", "numpy", "torch"],
)
def test_a_seed_within_a_call_does_not_reach_the_run(bounded, seed, draw):
    """The run's draws are the same with and without seeds in the reward, and a reward's own draws of Python and NumPy
    differ from call to call."""
    drawn: list[float] = []

    def draws_of_the_run(own_seed: int | None) -> list[float]:
        def reward(completions, **_):
            if own_seed is not None:
                seed(own_seed)
            drawn.append(draw())
            return [1.0] * len(completions)

        function = bounded(reward)
        seed(7)
        return [(function(completions=COMPLETIONS), draw())[1] for _ in range(3)]

    assert draws_of_the_run(None) == draws_of_the_run(1) == draws_of_the_run(2)
    assert len(set(drawn[:3])) == 3
    assert len(set(drawn[3:6])) == 1


@pytest.mark.parametrize(
    "take_long",
    [
        lambda: time.sleep(0.2),
        lambda: re.match(r"(a+)+$", "a" * 22 + "b"),
        lambda: sum(i * i for i in range(2_000_000)),
    ],
    ids=["sleep", "expression", "loop"],
)
def test_a_slow_call_is_named_once(bounded, caplog, monkeypatch, take_long):
    def slow(completions, **_):
        take_long()
        return [1.0] * len(completions)

    monkeypatch.setattr(own, "SLOW", 0.02)
    reward = bounded(slow)
    assert reward(completions=COMPLETIONS) == reward(completions=COMPLETIONS)
    assert [record.getMessage() for record in caplog.records] == [
        "the reward mine has been scoring 8 completions for 0.02 seconds; the run waits for it"
    ]
    caplog.clear()
    bounded(values())(completions=COMPLETIONS)
    assert not caplog.records


def test_the_lists_of_the_run_are_not_changed(bounded):
    def changes(completions, answer, prompts, completion_ids, **_):
        completions[0][0]["content"] = "other"
        prompts[0].pop()
        answer.reverse()
        completion_ids[0].clear()
        return [1.0, 1.0, completions.clear()]

    def given() -> dict[str, Any]:
        chats = [[{"role": "assistant", "content": text}] for text in "abc"]
        return {"completions": chats, "answer": list("abc"), "prompts": chats[:], "completion_ids": [[1], [2], [3]]}

    (columns := given())["prompts"] = given()["prompts"]
    bounded(changes)(**columns)
    assert columns == given()


def test_only_finite_numbers_are_logged_as_metrics(bounded, caplog):
    logged = {}

    def logs(completions, log_metric, **_):
        log_metric("half", np.float32(0.5))
        log_metric(name="one", value=torch.tensor(1))
        for wrong in ("text", float("nan"), None, [1.0]):
            log_metric("wrong", wrong)
        log_metric(7, 1.0)
        return [1.0] * len(completions)

    bounded(logs)(completions=COMPLETIONS, log_metric=logged.__setitem__)
    assert logged == {"half": 0.5, "one": 1.0}
    assert len(caplog.records) == 5
    assert "the reward mine logged 'text' as 'wrong'; log_metric takes a name and a finite" in caplog.text


def test_an_asynchronous_reward_is_awaited_by_one_event_loop(bounded):
    """The loop stays open between calls, as its clients need. It also works inside a running loop, as in a notebook."""
    loops = set()

    async def later(completions, **_):
        await asyncio.sleep(0.001)
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def within() -> list[float]:
        return reward(completions=COMPLETIONS)

    reward = bounded(later)
    assert reward(completions=COMPLETIONS) == asyncio.run(within()) == [1.0] * 8
    assert len(loops) == 1
