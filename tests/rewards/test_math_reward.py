"""The math reward judges answers by value in worker processes with hard time limits, and gives the same result in any
thread or process."""

import logging
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reward_cases import ADVERSARIAL, HANG, gold_answers, within

from rewards.math import QUICK, MathReward

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def math_reward():
    return MathReward(timeout=10, workers=2)


def boxed(answer):
    """Return a completion with this answer in a box."""
    return rf"So it is $\boxed{{{answer}}}$."


def test_a_gold_may_be_a_number_a_box_or_a_solution_of_gsm8k(math_reward):
    golds = [42, r"\boxed{7}", "3 + 4 = <<3+4=7>>7\n#### 7", "3 + 4 = <<3+4=7>>7\n#### 7", "7"]
    answers = ["42.0", "7", "7", "3", ""]
    assert math_reward([boxed(answer) for answer in answers], answer=golds) == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_last_box_is_the_answer(math_reward):
    texts = [r"\boxed{1} no, \boxed{2}", r"\boxed{2} no, \boxed{1}", r"\boxed{\boxed{2}}", r"\boxed{2} and \boxed{"]
    assert math_reward(texts, answer=["2"] * 4) == [1.0, 0.0, 1.0, 0.0]


def test_without_a_box_the_text_is_read_unless_a_box_is_required(math_reward):
    texts = ["I get 41, so the answer is 42.", r"Hence $x=\frac{84}{2}$", "The answer is 41.", "No idea."]
    assert math_reward(texts, answer=["42"] * 4) == [1.0, 1.0, 0.0, 0.0]
    strict = MathReward(require_boxed=True)
    strict._pool = math_reward._pool
    assert strict([*texts, boxed(42)], answer=["42"] * 5) == [0.0] * 4 + [1.0]


def test_an_answer_after_megabytes_of_text_is_found(math_reward):
    texts = ["hm " * 1_000_000 + boxed(answer) for answer in (42, 43)]
    assert math_reward(texts, answer=["42", "42"]) == [1.0, 0.0]


def test_the_answer_of_a_conversation_is_in_its_last_message(math_reward):
    """Completions may be lists of messages. Only the assistant's last message counts; a missing one has reward 0."""
    earlier = [{"role": "assistant", "content": boxed(1)}, {"role": "tool", "content": boxed(3)}]
    right = [*earlier, {"role": "assistant", "content": boxed(2)}]
    wrong = [*earlier, {"role": "assistant", "content": [{"type": "text", "text": boxed(3)}]}]
    silent = [{"role": "assistant", "content": None}]
    assert math_reward([right, wrong, silent, []], answer=["2"] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "aime25", "amc23"])
def test_real_answers_equal_themselves_in_any_notation_and_no_other_answer(math_reward, name):
    """Each true answer of a real data set is accepted in four notations. Control: the answer of the next problem is
    refused, unless it is the same."""
    golds = gold_answers(name, 100)
    for way in ("{}", "{},", r"\boldsymbol{{{}}}", r"\text{{The answer is }} {}"):
        respelt = [way.format(gold.replace(r"\frac", r"\dfrac")) for gold in golds]
        assert math_reward([boxed(gold) for gold in respelt], answer=golds) == [1.0] * len(golds)
    neighbours = golds[1:] + golds[:1]
    rewards = math_reward([boxed(gold) for gold in neighbours], answer=golds)
    assert all(r == 0.0 for r, a, b in zip(rewards, golds, neighbours, strict=True) if a != b)


def test_an_answer_that_hangs_does_not_affect_other_rewards():
    """The hanging answer has reward 0 and counts as a timeout; the other answers have their usual rewards."""
    reward, metrics = MathReward(timeout=QUICK + 0.1, workers=1), {}
    texts = [boxed(42), HANG, boxed(42), boxed(41)]
    assert within(60, lambda: reward(texts, answer=["42"] * 4, log_metric=metrics.__setitem__)) == [1, 0, 1, 0]
    assert metrics == {"rewards/unparseable_gold": 0.0, "rewards/math_timeout": 1.0}
    assert reward(texts[2:], answer=["42"] * 2, log_metric=metrics.__setitem__) == [1, 0]
    assert metrics["rewards/math_timeout"] == 0.0  # control: a wrong answer is not a timeout


def test_a_worker_is_charged_for_no_import_and_a_gold_that_took_too_long_is_read_again():
    """A fifth of a second, less than the imports take, is enough for a worker's first comparison and for the first one
    after an alarm. A gold that has no time is left out, but is read once it has time. Control: a hang has no reward."""
    reward = MathReward(timeout=0.2, workers=1)
    assert reward([boxed(r"\sqrt{4}"), HANG, boxed(r"\sqrt{9}")], answer=["2", "42", "3"]) == [1.0, 0.0, 1.0]
    for reward.timeout, expected in ((1e-4, None), (0.2, 1.0)):
        assert reward([boxed(r"x+\frac{1}{2}")], answer=[r"\frac{2x+1}{2}"]) == [expected]


@pytest.mark.slow
def test_the_processor_time_of_a_call_is_bounded():
    """Ten hostile answers, each of which alone would take the limit of 2 seconds, are cut off after QUICK seconds each.
    Processor time is measured, which does not depend on the machine's load."""
    bombs = [boxed(rf"9^{{9^{{9^{{{n}}}}}}}") for n in range(9, 19)]
    reward = MathReward(timeout=2, workers=1)
    before = processor_time_of_children()
    assert reward([*bombs, boxed(42)], answer=["42"] * 11) == [0.0] * 10 + [1.0]
    del reward  # ends its worker, whose time is then counted
    assert 10 * QUICK <= processor_time_of_children() - before < 10 * QUICK + 2 * 2 + 6  # 6: start of a worker


def processor_time_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_killed_worker_is_replaced():
    reward = MathReward(workers=1)
    pids = []
    for _ in range(3):
        assert reward([boxed(42), boxed(41)], answer=["42"] * 2) == [1.0, 0.0]
        pids.append(reward._pool._idle[0].process.pid)
        if len(pids) == 2:
            os.killpg(pids[-1], signal.SIGKILL)  # kills the worker's child too, which could still answer
    assert pids[0] == pids[1] != pids[2]  # a worker is kept between calls, unless it is killed


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of a process from /proc")
@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_does_not_outlive_a_parent_that_is_killed(busy):
    script = (
        "from rewards.math import MathReward; import time\n"
        "reward = MathReward(timeout=3, workers=1)\n"
        "assert reward(['1'], answer=['1']) == [1.0]\n"
        "print(reward._pool._idle[0].process.pid, flush=True)\n"
        f"if {busy}: reward([{HANG!r}], answer=['1'])\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=with_repo_on_path()
    )
    try:
        worker = int(parent.stdout.readline())
        time.sleep(0.5)
        assert alive(worker)  # control
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 30
    while alive(worker):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def alive(pid):
    """Return True if a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def with_repo_on_path():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}


def test_threads_get_the_same_rewards_as_the_main_thread(math_reward):
    golds = [str(n % 7) for n in range(40)]
    texts = [boxed(n % 5) for n in range(40)]
    expected = [float(n % 7 == n % 5) for n in range(40)]
    assert math_reward(texts, answer=golds) == expected
    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(math_reward, texts[i:], answer=golds[i:]) for i in range(8)]
        assert [call.result(120) for call in calls] == [expected[i:] for i in range(8)]


def score_in_child(reward, connection):
    """Score three completions in a child process, and send the rewards to the parent."""
    connection.send(reward([boxed(42), boxed(41), HANG], answer=["42"] * 3))
    connection.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.slow
def test_a_daemonic_subprocess_gets_the_same_rewards(method):
    reward = MathReward(timeout=2, workers=1)
    assert reward([boxed(42)], answer=["42"]) == [1.0]  # starts a worker, which must not be shared
    context = multiprocessing.get_context(method)
    parents_end, childs_end = context.Pipe()
    child = context.Process(target=score_in_child, args=(reward, childs_end), daemon=True)
    child.start()
    assert parents_end.poll(120)
    assert parents_end.recv() == [1.0, 0.0, 0.0]
    child.join(30)
    assert child.exitcode == 0
    assert reward([boxed(42), boxed(41)], answer=["42"] * 2) == [1.0, 0.0]  # the parent's own worker still works


@pytest.mark.slow
def test_a_fork_during_another_threads_call_does_not_block():
    """A child process that is forked while another thread uses the only worker still gets its rewards."""
    reward = MathReward(timeout=3, workers=1)
    assert reward([boxed(42)], answer=["42"]) == [1.0]
    context = multiprocessing.get_context("fork")
    parents_end, childs_end = context.Pipe()
    child = context.Process(target=score_in_child, args=(reward, childs_end), daemon=True)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(reward, [HANG, boxed(42)], answer=["42"] * 2)
        time.sleep(0.5)  # the only worker is busy now
        child.start()
        assert call.result(60) == [0.0, 1.0]
    try:
        assert parents_end.poll(60)
        assert parents_end.recv() == [1.0, 0.0, 0.0]
    finally:
        child.kill()
        child.join()


def test_hostile_answers_neither_hang_nor_crash():
    reward = MathReward(timeout=QUICK, workers=1)
    texts = [*ADVERSARIAL.values(), boxed(42)]
    rewards = within(180, lambda: reward(texts, answer=["42"] * len(texts)))
    contain_the_answer = {"nested braces", "last"}  # these may have reward 1
    for name, score in zip([*ADVERSARIAL, "last"], rewards, strict=True):
        assert isinstance(score, float), name
        assert score == 0.0 or name in contain_the_answer, name
    assert rewards[-1] == 1.0


@pytest.mark.slow
def test_hostile_true_answers_neither_hang_nor_crash():
    reward = MathReward(timeout=2, workers=2)
    golds = [*ADVERSARIAL.values(), "42"]
    rewards = within(180, lambda: reward([boxed(42)] * len(golds), answer=golds))
    assert all(score in (None, 0.0, 1.0) for score in rewards)
    assert rewards[-1] == 1.0
    assert rewards[0] is None


UNPARSEABLE = ["", None, "???", "hello world", "not a number", r"\frac{1}{", r"\boxed{4", "9" * 20_000]


def test_an_unparseable_true_answer_is_reported_once_and_not_scored(math_reward, caplog):
    """The reward is None, and a metric counts such answers. Each of them is reported in one short warning, which a
    second call does not repeat."""
    reward, metrics = MathReward(), {}
    reward._pool = math_reward._pool
    golds = [*UNPARSEABLE, "42"]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            rewards = reward([boxed(42)] * len(golds), answer=golds, log_metric=metrics.__setitem__)
            assert rewards == [None] * len(UNPARSEABLE) + [1.0]
    assert metrics["rewards/unparseable_gold"] == len(UNPARSEABLE)
    reports = [record.getMessage() for record in caplog.records if "cannot be parsed" in record.getMessage()]
    assert len(reports) == len(UNPARSEABLE)
    assert all(len(report) < 500 for report in reports)
    assert not any("'42'" in report for report in reports)


def test_a_missing_answer_column_gives_an_error_that_names_the_key(math_reward):
    with pytest.raises(ValueError, match=r"'answer'.*'solution'.*data\.columns"):
        math_reward(["1"], solution=["1"])
    with pytest.raises(ValueError, match="1 completions but 2"):
        math_reward(["1"], answer=["1", "2"])


def test_without_completions_there_are_no_rewards(math_reward):
    assert math_reward([], answer=[]) == []


def test_an_unpickled_reward_has_its_own_workers():
    """An unpickled reward has the same settings and gives the same rewards, but starts a worker of its own."""
    reward = MathReward(timeout=3.5, workers=1)
    texts, golds = [boxed(42), boxed(41), boxed(1)], ["42", "42", "???"]
    assert reward(texts, answer=golds) == [1.0, 0.0, None]
    unpickled = pickle.loads(pickle.dumps(reward))
    assert unpickled(texts, answer=golds) == [1.0, 0.0, None]
    assert (unpickled.timeout, unpickled.workers, unpickled.__name__) == (3.5, 1, "math")
    assert unpickled._pool._idle[0].process.pid != reward._pool._idle[0].process.pid
