"""The reward `letter` reads the letter that a completion states. The expected letters are written by hand, and a second
implementation, which goes through tokens and uses no regular expression, agrees with the reward."""

from __future__ import annotations

import random

import pytest

from rewards import make_rewards
from rewards.letter import LetterReward, stated_letter

CASES: list[tuple[str, str | None]] = [
    # a box
    (r"\boxed{C}", "C"),
    (r"\boxed{ C }", "C"),
    (r"\boxed {B}", "B"),
    (r"\boxed{\text{C}}", "C"),
    (r"\boxed{\textbf{D}}", "D"),
    (r"\boxed{\mathrm{A}}", "A"),
    (r"\boxed{\mathbf{\text{B}}}", "B"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{(\text{C})}", "C"),
    (r"\boxed{\left(C\right)}", "C"),
    (r"\boxed{C) 12 m}", "C"),
    (r"\boxed{C)12 m}", "C"),
    (r"\boxed{(C) 12 m}", "C"),
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
    ("answer: C", "C"),
    ("ANSWER: C.", "C"),
    ("Answer = C", "C"),
    ("Answer：C", "C"),
    ("**Answer: (C)**", "C"),
    ("**Answer:** C", "C"),
    ("**Answer**: C", "C"),
    ("Answer: **C**", "C"),
    ("Answer: `C`", "C"),
    ("Answer: $C$", "C"),
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
    ("Answer: (B), (C)", None),
    ("Answer: 12 m", None),
    ("Answer choices: A) 1, B) 2", None),
    # sentences
    ("The answer is C.", "C"),
    ("the answer is (C)", "C"),
    ("The answer is: C", "C"),
    ("The answer is **C**.", "C"),
    ("The correct answer is C, 12 m.", "C"),
    ("The correct answer is option B.", "B"),
    ("The correct answer is the choice (D) 3 m.", "D"),
    ("The answer is C because A is too large.", "C"),
    ("The answer is A since it is the largest.", "A"),
    ("The answer is therefore (B).", "B"),
    ("The answer must be D.", "D"),
    ("The answer to this question is B.", "B"),
    ("the correct option is (B)", "B"),
    ("The best choice is D!", "D"),
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
    ("C", None),
    ("", None),
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

# ---- the second implementation -------------------------------------------------------------------------------------

STYLES = {*"$*`\"“”'‘’", "\\(", "\\)", "\\[", "\\]", "\\left", "\\right", "\\displaystyle"}
SPACES = {"\\ ", "\\,", "\\;", "\\:", "\\!", "\\quad", "\\qquad", "~"}
NOUNS = ("option", "choice", "letter")


def tokens_of(text: str) -> list[str]:
    """Split a text into commands, words, single spaces or line breaks, and other characters. Styles are left out."""
    tokens, place = [], 0
    while place < len(text):
        end = place + 1
        if text[place] == "\\":
            while end < len(text) and text[end].isalpha():
                end += 1
            end += end == place + 1
        elif text[place].isalnum() or text[place] == "_":
            while end < len(text) and (text[end].isalnum() or text[end] == "_"):
                end += 1
        elif text[place].isspace():
            while end < len(text) and text[end].isspace():
                end += 1
        token = text[place:end]
        if token in SPACES or token.isspace():
            token = "\n" if "\n" in token else " "
        if token not in STYLES and not token.startswith(("\\text", "\\math")):
            if token.isspace() and tokens and tokens[-1].isspace():  # the style between two spaces is left out
                token = "\n" if "\n" in (token, tokens.pop()) else " "
            tokens.append(token)
        place = end
    return tokens


class Reader:
    """Reads tokens from the first one. Spaces and closing braces, which end a style, are skipped on request."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def skip(self, *skipped: str) -> None:
        while self.tokens and self.tokens[0] in skipped:
            self.tokens = self.tokens[1:]

    def take(self, *words: str) -> bool:
        """Remove these words, with spaces between and before them, if they come next."""
        rest = self.tokens
        for word in words:
            while rest and rest[0].isspace():
                rest = rest[1:]
            if not rest or rest[0].lower() != word:
                return False
            rest = rest[1:]
        self.tokens = rest
        return True

    def take_one(self, *words: str) -> bool:
        return any(self.take(word) for word in words)


def after_announcement(tokens: list[str], place: int) -> list[str] | None:
    """Return the tokens after the announcement of an answer whose noun is at this place."""
    before = [token.lower() for token in tokens[max(0, place - 2) : place]]
    adjective = before[0] if len(before) == 2 and before[1].isspace() else ""
    noun = tokens[place].lower()
    if noun == "answer" and adjective in ("wrong", "incorrect"):
        return None
    if noun != "answer" and not (noun in NOUNS and adjective in ("correct", "right", "best")):
        return None
    reader = Reader(tokens[place + 1 :])
    reader.take_one(*NOUNS)
    for article in ("the", "this"):
        for thing in ("question", "problem"):
            reader.take("to", article, thing)
    reader.skip(" ", "\n", "}")
    verbs = (("is",), ("must", "be"), ("should", "be"), ("would", "be"))
    if not (reader.take_one(":", "：", "=") or any(reader.take(*verb) for verb in verbs)):
        return None
    reader.skip(" ", "\n", "}")
    reader.take_one(":", "：")
    if reader.take_one("therefore", "thus", "hence", "indeed"):
        reader.take(",")
    return reader.tokens


def is_letter(token: str) -> bool:
    return token in list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def leading_letter(tokens: list[str]) -> str | None:
    reader = Reader([token for token in tokens if token not in ("{", "}")])
    for words in (("the", noun) for noun in NOUNS):
        reader.take(*words)
    if reader.take_one(*NOUNS):
        reader.take(":")
    reader.skip(" ", "\n")
    opened = reader.take_one("(", "[")
    reader.skip(" ", "\n")
    letter, rest = "".join(reader.tokens[:1]), [*reader.tokens[1:], "", "", ""]
    if not is_letter(letter):
        return None
    if opened:
        rest = rest[1:] if rest[0].isspace() else rest
        if (
            rest[0] not in (")", "]")
            or rest[1] == "-"
            or rest[1][:1].isalpha()
            or "?" in rest[1 : 2 + rest[1].isspace()]
        ):
            return None
    elif rest[0] in (".", ":", ",", ";", "!", "—", "–"):
        if rest[1][:1].isalnum():
            return None
    elif rest[0] == ")":
        if rest[1] == "-":
            return None
    elif rest[0] == " ":
        if rest[1] not in ("", "-", "(", "[", "because", "since", "as", "due"):
            return None
    elif rest[0] not in ("", "\n"):
        return None
    return None if names_another(rest) else letter


def names_another(rest: list[str]) -> bool:
    """Return True if another letter follows, joined by a comma or a word such as "or"."""
    marks, start = [], 0
    while start < len(rest) and rest[start] and not rest[start][0].isalnum():
        marks.append(rest[start])
        start += 1
    reader = Reader(rest[start:])
    if reader.take_one("or", "and"):
        while reader.tokens[0] and not reader.tokens[0][0].isalnum():
            reader.tokens = reader.tokens[1:]
        reader.take_one(*NOUNS)
        reader.skip(" ", "(", "[")
    elif not set(marks) & {",", ";", "/", "&"}:
        return False
    letter, (after, beyond) = reader.tokens[0], reader.tokens[1:3]
    return is_letter(letter) and after != "-" and not (after.isspace() and beyond[:1].islower())


def letter_by_tokens(text: str) -> str | None:
    tokens = tokens_of(text.split("</think>")[-1])
    statements: dict[int, list[str]] = {}
    for place, token in enumerate(tokens):
        after = after_announcement(tokens, place)
        if after is not None:
            statements[place] = after
        start = place + 1 + (tokens[place + 1 : place + 2] == [" "])
        if token == "\\boxed" and tokens[start : start + 1] == ["{"]:
            statements = {place: s for place, s in statements.items() if tokens[place] != "\\boxed"}  # the last box
            depth, end = 1, start + 1
            while depth and end < len(tokens):
                depth += {"{": 1, "}": -1}.get(tokens[end], 0)
                end += 1
            statements[place] = tokens[start + 1 : end - 1] if not depth else []
    letters = [letter for _, statement in sorted(statements.items()) if (letter := leading_letter(statement))]
    return letters[-1] if letters else None


# ---- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "letter"), CASES)
def test_the_stated_letter_equals_the_one_written_by_hand(text: str, letter: str | None) -> None:
    assert stated_letter(text) == letter
    assert letter_by_tokens(text) == letter


def test_both_implementations_agree_on_joined_cases() -> None:
    """Each of 3,000 texts joins two or three random cases. Control: most texts state a letter, and over 150
    state none.
    """
    draw = random.Random(0)
    letters = []
    for _ in range(3000):
        joint = draw.choice([" ", "\n", "\n\n", ". "])
        text = joint.join(text for text, _ in draw.choices(CASES, k=draw.choice([2, 3])))
        letters.append(stated_letter(text))
        assert letters[-1] == letter_by_tokens(text), text
    assert 150 < letters.count(None) < 1500


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
