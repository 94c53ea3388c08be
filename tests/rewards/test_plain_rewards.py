"""The rewards without a worker: boxed, format, soft_overlong, repetition. No reward crashes."""

import pickle

import pytest
from reward_cases import ADVERSARIAL, within

from rewards import REWARDS, make_rewards
from rewards.boxed import BoxedReward
from rewards.format import FormatReward
from rewards.length import SoftOverlongReward
from rewards.repetition import RepetitionReward
from rewards.text import last_boxed

NEEDED = {"soft_overlong": {"max_completion_len": 100, "soft_punish_cache": 20}}


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x_{1_{2}}} tail }", "x_{1_{2}}"),
        (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\boxed{1} and \boxed without braces", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed{1} then \boxed{\frac{1}{2}", None),
        (r"\boxed{1\}", None),
        (r"\boxedx{1}", None),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_last_boxed_balances_its_braces(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize("depth", [0, 1, 2, 50, 100_000])
def test_last_boxed_finds_a_box_with_braces_of_any_depth(depth):
    inner = "{" * depth + "x" + "}" * depth
    assert last_boxed(rf"\boxed{{{inner}}}") == inner
    assert last_boxed(rf"\boxed{{{inner}") is None  # control: one brace is missing


def test_boxed_compares_texts_exactly():
    """Only spaces around the texts are ignored: 0.5 does not equal 1/2. An answer without a box, or in a broken box, is
    wrong."""
    golds = [r"\frac{1}{2}", " 7 ", 7, r"\boxed{7}", r"\frac{1}{2}", "7", "7"]
    texts = [r"\boxed{ \frac{1}{2} }", r"\boxed{7}", r"\boxed{7}", r"\boxed{7}", r"\boxed{0.5}", "7", r"\boxed{7"]
    assert BoxedReward()(texts, answer=golds) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_boxed_gives_no_score_without_a_true_answer():
    """If the true answer is missing or empty, the reward is None. A missing column of answers is an error."""
    assert BoxedReward()([r"\boxed{}"] * 3, answer=[None, "", "1"]) == [None, None, 0.0]
    with pytest.raises(ValueError, match=r"data\.columns"):
        BoxedReward()(["1"])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (r"It is \boxed{1}.", 1.0),
        (r"<think>hm</think> \boxed{1}", 1.0),
        (r"hm, \boxed{1}?</think> \boxed{1}", 1.0),
        (r"<think>a</think><think>b</think> \boxed{1}", 1.0),
        ("It is 1.", 0.0),
        (r"\boxed{1} or \boxed{2}", 0.0),
        (r"\boxed{\boxed{1}}", 0.0),
        (r"\boxed{1", 0.0),
        (r"\boxed{ }", 0.0),
        (r"<think>hm, \boxed{1}", 0.0),
        (r"<think>hm, \boxed{1}</think> done", 0.0),
        (r"</think> <think> \boxed{1}", 0.0),
    ],
)
def test_format_rewards_exactly_one_box_after_the_thinking(text, reward):
    assert FormatReward()([text, [{"role": "assistant", "content": text}]]) == [reward, reward]


def test_format_think_equals_the_reward_of_trl():
    """Only a text with exactly one opening and one closing tag of thoughts, in this order, has reward 1."""
    texts = ["<think>hm</think> 1", "hm</think> 1", "<think>hm", "<think><think>hm</think> 1"]
    assert FormatReward(style="think")(texts) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("length", "reward"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)])
def test_soft_overlong_equals_the_ramp_of_dapo(length, reward):
    function = SoftOverlongReward(max_completion_len=100, soft_punish_cache=20)
    assert function(["text"], completion_ids=[[1] * length]) == [pytest.approx(reward)]


def test_repetition_counts_repeated_ngrams():
    torch = pytest.importorskip("torch")
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [5], []]
    function = RepetitionReward(ngram_size=2, max_penalty=-2.0)
    assert function([""] * 4, completion_ids=ids) == [0.0, -1.5, 0.0, 0.0]
    assert function([""] * 4, completion_ids=[torch.tensor(row) for row in ids]) == [0.0, -1.5, 0.0, 0.0]


@pytest.mark.parametrize("name", ["soft_overlong", "repetition"])
def test_token_rewards_require_their_column(name):
    (function,), _ = make_rewards([{"name": name, **NEEDED.get(name, {})}])
    with pytest.raises(ValueError, match="completion_ids"):
        function(["text"])


@pytest.mark.parametrize("style", [{}, {"style": "think"}])
@pytest.mark.parametrize("name", [name for name in REWARDS if name != "math"])  # math has its own test, with limits
def test_hostile_texts_neither_hang_nor_crash(name, style):
    if style and name != "format":
        pytest.skip("format alone has styles")
    (function,), _ = make_rewards([{"name": name, **NEEDED.get(name, {}), **style}])
    texts = list(ADVERSARIAL.values())
    columns = {
        "answer": ["C" if name == "letter" else "42"] * len(texts),
        "answers": [["42", "maybe " * 100_000]] * len(texts),
        "tests": [["assert add(1, 2) == 3"]] * len(texts),
        "completion_ids": [list(text.encode("utf-8", "replace")[:20_000]) for text in texts],
    }
    rewards = within(60, lambda: function(texts, **columns))
    assert len(rewards) == len(texts)
    assert all(isinstance(reward, float) for reward in rewards)


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "math"])
def test_rewards_survive_pickling(name):
    (function,), _ = make_rewards([{"name": name, **NEEDED.get(name, {})}])
    unpickled = pickle.loads(pickle.dumps(function))
    columns = {"answer": ["A", "B"], "answers": [["boxedA"], ["B"]], "completion_ids": [[1] * 90, [1, 2, 3]]}
    columns["tests"] = [["assert True"]] * 2
    texts = ["\\boxed{A}\n```\npass\n```", "none"]
    assert unpickled(texts, **columns) == function(texts, **columns)
    assert len(set(function(texts, **columns))) == 2  # control: the two texts have different rewards
    assert unpickled.__name__ == name
