"""The reward `letter` reads the letter that a completion states last. The expected letters are written by hand."""

from __future__ import annotations

import random
import re

import pytest

from rewards import make_rewards
from rewards.text import LetterReward, final_parts, stated_letter

CASES: list[tuple[str, str | None]] = [
    # a box
    (r"\boxed{C}", "C"),
    (r"\boxed{ C }", "C"),
    (r"\boxed {B}", "B"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{\textbf{D}}", "D"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{(\text{C})}", "C"),
    (r"\boxed{\left(C\right)}", "C"),
    (r"\boxed{C) 12 m}", "C"),
    (r"\boxed{C)12 m}", "C"),
    (r"\boxed{C. 12 m}", "C"),
    (r"\boxed{C: 12 m}", "C"),
    (r"\boxed{\text{C) } \frac{1}{2}}", "C"),
    (r"\boxed{\textbf{(E)}\ 27}", "E"),
    (r"\boxed{\text{Option C}}", "C"),
    (r"\boxed{\text{Answer: D}}", "D"),
    (r"\boxed{A) (R)-butan-2-ol and (S)-butan-2-ol}", "A"),
    ("$$\\boxed{\n D\n}$$", "D"),
    (r"First \boxed{A}, then \boxed{B}.", "B"),
    (r"Hence $\boxed{Z}$ is right.", "Z"),
    (r"\boxed{12 m}", None),
    (r"\boxed{c}", None),
    (r"\boxed{}", None),
    (r"\boxed{C", None),
    (r"\boxed{B, C}", None),
    (r"\boxed{B \text{ or } C}", None),
    (r"\boxed{(B) and (C)}", None),
    (r"\boxed{ABC}", None),
    (r"\boxed{C_2}", None),
    (r"\boxed{C+1}", None),
    (r"\boxed{(E)-but-2-ene}", None),
    (r"\boxed{A proton}", None),
    # "Answer:"
    ("Answer: C", "C"),
    ("ANSWER: C.", "C"),
    ("Answer = C", "C"),
    ("Answer：C", "C"),
    ("**Answer: (C)**", "C"),
    ("**Answer:** C", "C"),
    ("Answer: **C**", "C"),
    ("Answer: `C`", "C"),
    (r"Answer: \(C\)", "C"),
    (r"Answer: $\text{C}$", "C"),
    (r"Answer: $\boxed{C}$", "C"),
    (r"\textbf{Answer:} C", "C"),
    (r"$\textbf{Answer: (C)}$", "C"),
    ('Answer: "C"', "C"),
    ("Answer: [C]", "C"),
    ("Answer: C)", "C"),
    ("Answer: C) 12 m", "C"),
    ("Answer: C. 12 m", "C"),
    ("Answer: C - 12 m", "C"),
    ("Answer: C (12 m)", "C"),
    ("Answer:\n\nC\n\nThis is because B and D are too small.", "C"),
    ("Final answer: Option C", "C"),
    ("### Correct answer: B", "B"),
    ("The answer choice: C", "C"),
    ("Answer: A proton and a neutron", None),
    ("Answer: I do not know.", None),
    ("Answer: C-H bonds break", None),
    ("Answer: DNA", None),
    ("Answer: N/A", None),
    ("Answer: B or C", None),
    ("Answer: B, C", None),
    ("Answer: 12 m", None),
    ("Answer choices: A) 1, B) 2", None),
    # sentences
    ("The answer is C.", "C"),
    ("the answer is (C)", "C"),
    ("The answer is **C**.", "C"),
    ("The correct answer is C, 12 m.", "C"),
    ("The correct answer is option B.", "B"),
    ("The correct answer is the choice (D) 3 m.", "D"),
    ("The answer is C because A is too large.", "C"),
    ("The answer is therefore (B).", "B"),
    ("The answer must be D.", "D"),
    ("The answer to this question is B.", "B"),
    ("the correct option is (B)", "B"),
    ("The right option: A", "A"),
    ("The answer is C, I think.", "C"),
    ("The answer is C, not B.", "C"),
    ("The answer is not C.", None),
    ("The wrong answer is B.", None),
    ("The incorrect option is B.", None),
    ("The answer is C?", None),
    ("The answer is (B) or (C).", None),
    ("The answer is either B or C.", None),
    ("I choose C.", None),
    ("", None),
    # nothing but the letter
    ("C", "C"),
    (" **C**\n", "C"),
    ("(C)", "C"),
    ("C.", "C"),
    ("C) 12 m", "C"),
    ("Option C", "C"),
    ("A proton", None),
    ("C H", None),
    ("I", "I"),
    ("I think so.", None),
    # tags and headings
    ("<answer>C</answer>", "C"),
    ("<answer> (C) </answer>", "C"),
    ("<answer>C) 12 m</answer>", "C"),
    (r"<answer>\boxed{C}</answer>", "C"),
    (r"\boxed{B} <answer>C</answer>", "C"),
    (r"<answer>B</answer> \boxed{C}", "C"),
    (r"\boxed{C}, in \boxed{} as requested", "C"),
    (r"\boxed{A}, \boxed{C}", None),
    ("<answer>A or C</answer>", None),
    ("<answer>C", None),
    ("**Answer**\nC", "C"),
    ("### Final answer\n\n(C)", "C"),
    # several statements, and thoughts
    ("The answer is B. No, the answer is C.", "C"),
    ("The answer is B. Is the answer C?", "B"),
    ("The answer is B? No: the correct option is D.", "D"),
    (r"\boxed{B} I made an error. The answer is C.", "C"),
    (r"The answer is C. So \boxed{B}.", "B"),
    (r"The answer is C, which is \boxed{12 m}.", "C"),
    (r"Answer: C. The length is \boxed{12 m}.", "C"),
    (r"<think>The answer is B.</think>The answer is C.", "C"),
    (r"The answer is B.</think>\boxed{C}", "C"),
    (r"\boxed{B}</think>It is clear.", None),
    (r"</think>Answer: A</think>Answer: B", "B"),
]


@pytest.mark.parametrize(("text", "letter"), CASES)
def test_the_stated_letter_equals_the_one_written_by_hand(text: str, letter: str | None) -> None:
    assert stated_letter(*final_parts([text], {})) == letter


def test_the_last_statement_of_joined_texts_decides() -> None:
    """Each of 3,000 texts joins two or three cases; a letter alone is no statement then. Control: the first statements
    would give other letters in a third of them."""
    draw = random.Random(0)
    stating = [case for case in CASES if re.search(r"boxed|<answer>|(?i:answer|option|choice)", case[0])]
    stating = [case for case in stating if "think>" not in case[0] and stated_letter(f"So: {case[0]}") == case[1]]
    others = [(text, letter) for text, letter in stating if letter is None and not re.search("boxed|<answer>", text)]
    firsts = 0
    for _ in range(3000):
        parts = draw.choices([case for case in stating if case[1]], k=2) + draw.choices(others, k=draw.randrange(2))
        joined = draw.choice(["\n", "\n\n", ". "]).join(text for text, _ in parts)
        assert stated_letter(joined) == parts[1][1], joined
        firsts += parts[0][1] == parts[1][1]
    assert len(stating) > 80
    assert firsts < 2000


def test_the_right_letter_scores_one_and_any_other_zero() -> None:
    (function,), _ = make_rewards(["letter"])
    assert len(CASES) >= 100
    for gold in "ABCD":
        texts = [text for text, _ in CASES]
        expected = [float(letter == gold) for _, letter in CASES]
        assert function(texts, answer=[gold] * len(texts)) == expected
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        assert function(messages, answer=[gold] * len(texts)) == expected
        assert 0 < sum(expected) < len(texts)  # control


@pytest.mark.parametrize(
    ("gold", "reward"),
    [("C", 1), (" C\n", 1), ("(C)", 1), ("C)", 1), ("C.", 1), (r"\boxed{C}", 1), ("B", 0), ("(B)", 0)]
    + [(gold, None) for gold in (None, "", "c", "12 m", "C) 12 m", "CD", 2, "A or C")],
)
def test_a_gold_answer_that_is_no_letter_is_not_scored(gold: object, reward: float | None) -> None:
    assert LetterReward()(["The answer is C."], answer=[gold]) == [reward]


def test_the_reward_needs_the_column_answer() -> None:
    with pytest.raises(ValueError, match=r"the 'letter' reward needs a column 'answer'.*data\.columns"):
        LetterReward()(["C"])
