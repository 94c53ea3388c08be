"""The rewards without a worker: boxed, format, soft_overlong, repetition. No reward crashes."""

import pickle

import pytest
from reward_cases import ADVERSARIAL, within

from rewards import REWARDS, make_rewards
from rewards.text import (
    MARK,
    BoxedReward,
    FormatReward,
    RepetitionReward,
    SoftOverlongReward,
    final_parts,
    gold_text,
    last_boxed,
)

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
        (r"\boxed{}", None),
        (r"\boxed{1", ""),
        (r"\boxed{1} then \boxed{\frac{1}{2}", ""),
        (r"\boxed{1\}", ""),
        (r"\boxedx{1}", None),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_last_boxed_balances_its_braces(text, content):
    assert last_boxed(text) == content


FINAL_PARTS = [  # completion, prompt, end of the prompt after the chat template, final part
    ("a", "", "", "a"),
    ("<think>a</think>b", "", "", "b"),
    ("a</think>b</think>c", "", "", "c"),
    ("<think>a</think>b<think>c</think>d", "", "", "d"),
    ("<think>a", "", "", ""),
    ("a</think>b<think>c", "", "", ""),
    ("a", "q\n<think>\n", "", ""),
    ("a</think>b", "q\n<think>\n", "", "b"),
    ("a", "Reason in <think> tags: q", "", "a"),
    ("a", [{"role": "user", "content": "q"}], "assistant\n<think>\n", ""),
    ("a</think>b", [{"role": "user", "content": "q"}], "assistant\n<think>\n", "b"),
    ("a", [{"role": "user", "content": "q"}], "assistant\n<think>\n\n</think>\n\n", "a"),
    ("a", [{"role": "assistant", "content": "<think>"}, {"role": "user", "content": "q"}], "", "a"),
    ("a", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}], "", ""),
]


@pytest.mark.parametrize(("completion", "prompt", "end", "final"), FINAL_PARTS)
def test_every_reward_reads_only_the_text_after_the_reasoning(completion, prompt, end, final):
    """If a right answer replaces a letter of the completion, the reward is 1 if and only if that is the final part."""
    columns = {"prompts": [prompt] * 2, "prompt_ends": [end] * 2}
    assert final_parts([completion, [{"role": "assistant", "content": completion}]], columns) == [final, final]
    for answer, names in ((r"\boxed{F}", ("boxed", "letter", "format", "short_answer")), ("Answer: F", ("letter",))):
        places = [place for place in "abcd" if place in completion]
        texts = [completion.replace(place, answer) for place in places]
        columns = {"prompts": [prompt] * len(places), "prompt_ends": [end] * len(places)}
        for function in make_rewards(names)[0]:
            rewards = function(texts, answer=["F"] * len(texts), answers=[["F"]] * len(texts), **columns)
            assert rewards == [float(place == final) for place in places]


MARKED = [  # text, content of the last box, content of the last box or answer tag
    (r"\boxed{7}, written within \boxed{} as requested", "7", "7"),
    (r"\boxed{7} and not \boxed{...} or \boxed{\text{your answer}}", "7", "7"),
    (r"\boxed{\emptyset}, not \boxed{\{\}}", r"\{\}", r"\{\}"),
    (r"\boxed{3}, \boxed{5} and \boxed{7}", "3, 5, 7", "3, 5, 7"),
    (r"$\boxed{3}$ or $\boxed{5}$", "3, 5", "3, 5"),
    (r"\boxed{3}; \(\boxed{5}\), and \[\boxed{7}\]", "3, 5, 7", "3, 5, 7"),
    (r"\boxed{3} and then \boxed{5}", "5", "5"),
    (r"\boxed{3} \boxed{5}", "5", "5"),
    (r"Thus $\boxed 2$.", "2", "2"),
    (r"Thus \(x=\boxed-12\).", "-12", "-12"),
    (r"Thus $\boxed\frac12$.", r"\frac12", r"\frac12"),
    (r"\boxed 25 is right", "25", "25"),
    ("<answer>42</answer>", None, "42"),
    (r"\boxed{41} <answer>42</answer>", "41", "42"),
    (r"<answer>41</answer> \boxed{42}", "42", "42"),
    (r"<answer>It is \boxed{42}.</answer>", "42", "42"),
    (r"<answer></answer> \boxed{42} <answer> </answer>", "42", "42"),
    (r"\boxed{42} <answer>4", "42", ""),
    (r"\boxed{42} and \boxed{4", "", ""),
]


@pytest.mark.parametrize(("text", "box", "mark"), MARKED)
def test_the_last_mark_that_is_no_placeholder_holds_the_answer(text, box, mark):
    assert last_boxed(text) == box
    assert last_boxed(text, MARK) == mark


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        *[('["5"]', "5"), ("['5']", "5"), (["5"], "5"), ("{'answer': 5}", "5"), ('{"a": "x"}', "x"), ("[5]", "[5]")],
        *[(r'["\\frac12"]', r"\frac12"), (r"$\boxed 2$", "2"), (r"= \boxed5.", "5"), ("(1,2]", "(1,2]")],
        *[('["5", "7"]', None), ("{'a': 5, 'b': 6}", None), (r"\boxed{}", None), ("", None), (None, None), (0, "0")],
    ],
)
def test_a_gold_answer_is_read_out_of_its_box_or_its_list(gold, text):
    assert gold_text(gold) == text


@pytest.mark.parametrize("depth", [0, 1, 2, 50, 100_000])
def test_last_boxed_finds_a_box_with_braces_of_any_depth(depth):
    inner = "{" * depth + "x" + "}" * depth
    assert last_boxed(rf"\boxed{{{inner}}}") == inner
    assert last_boxed(rf"\boxed{{{inner}") == ""  # control: one brace is missing


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
    """Only a text with exactly one opening and one closing tag of thoughts, in this order, has reward 1. The prompt may
    contain the opening tag."""
    texts = ["<think>hm</think> 1", "hm</think> 1", "<think>hm", "<think><think>hm</think> 1"]
    assert FormatReward(style="think")(texts) == [1.0, 0.0, 0.0, 0.0]
    assert FormatReward(style="think")(texts, prompts=["q <think>\n"] * 4) == [0.0, 1.0, 0.0, 0.0]


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
        "reward": [0.5] * len(texts),
    }
    rewards = within(60, lambda: function(texts, **columns))
    assert len(rewards) == len(texts)
    assert all(isinstance(reward, float) for reward in rewards)


@pytest.mark.parametrize("name", [name for name in REWARDS if name != "math"])
def test_rewards_survive_pickling(name):
    (function,), _ = make_rewards([{"name": name, **NEEDED.get(name, {})}])
    unpickled = pickle.loads(pickle.dumps(function))
    columns = {"answer": ["C", "B"], "answers": [["C"], ["B"]], "completion_ids": [[1] * 90, [1, 2, 3]]}
    columns |= {"tests": [["assert True"]] * 2, "reward": [0.5, 1.0]}
    texts = ["\\boxed{C}\n```\npass\n```", "none"]
    assert unpickled(texts, **columns) == function(texts, **columns)
    assert len(set(function(texts, **columns))) == 2  # control: the two texts have different rewards
    assert unpickled.__name__ == name
