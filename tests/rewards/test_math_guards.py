r"""Guards are our rules for answers that the library math-verify would misjudge. They hold for random numbers and
texts."""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewards.math_worker import claimed, is_equal, latex_of, read, refused, word

WAYS = [  # ways to write a whole number
    "{n}", "${n}$", "{n}.", "{n:,}", "{n:_}", "{n} eggs", r"\text{{{n} dollars}}", r"\${n:,}", "€{n}", "{n}°", r"{n}\%",
    r"{n}^\circ", "x = {n}", "{n}.0", "{n}e0", r"{n} \times 10^{{0}}", r"{n} \text{{ cm}}^2", "1+{less}={n}",
    r"\frac{{{twice}}}{{2}}={n}", r"\boldsymbol{{{n}}}", r"\text{{The answer is }} {n}", "{n},", "{n} (eggs)",
    r"x\text{{ is }}\underline{{{n}}}", r"{n}\ \frac{{\text{{m}}}}{{\text{{s}}}}", r"\textbf{{(B)}}\ {n}", "x_1 = {n}",
]  # fmt: skip
numbers = st.integers(1, 10**9)


@pytest.mark.parametrize("way", WAYS)
@settings(derandomize=True, max_examples=10, deadline=None)
@given(n=numbers)
def test_a_number_equals_all_its_notations_and_no_other_number(way: str, n: int) -> None:
    text = way.format(n=n, less=n - 1, twice=2 * n).replace("_", r"\,")
    assert is_equal(str(n), text)
    assert not is_equal(str(n + 1), text)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(n=numbers, factor=st.sampled_from(["dozen", "hundred", "thousand", "million"]))
def test_a_word_such_as_thousand_multiplies_the_number(n: int, factor: str) -> None:
    scale = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}[factor]
    assert is_equal(str(n * scale), rf"{n}\text{{ {factor} eggs}}")
    assert not is_equal(str(n), f"{n} {factor}")


@settings(derandomize=True, max_examples=50, deadline=None)
@given(value=st.fractions(0, 1000, max_denominator=500))
def test_a_repeating_decimal_is_read_as_its_fraction(value: Fraction) -> None:
    """The test writes a fraction, by long division, as digits with an overline over the repeating part. `read` gives
    the fraction back."""
    whole, rest, digits, seen = value.numerator // value.denominator, value % 1, "", {}
    while rest not in seen:
        seen[rest] = len(digits)
        digits += str(int(rest * 10))
        rest = rest * 10 % 1
    start = seen[rest]
    reading = read(rf"{whole}.{digits[:start]}\overline{{{digits[start:]}}}")
    assert reading is not None
    assert reading.latex == latex_of(value)


FRAGMENTS = [
    "1", "23", "456", "0.", ".", ",", " ", "  ", "-", "=", "<", "(", ")", "[", "]", "{", "}", r"\{", r"\}", "_", "^",
    "°", "%", "$", "€", '"', "\\", r"\\", r"\,", r"\ ", r"\text{", r"\frac", r"\overline", r"\pi", r"\circ", r"\le",
    r"\neq", r"\approx", "x", "cm", "eggs", "dozen", "per", " or ", " and ", "not ", "e", "\n", "½", "٣", "\u202e",
    "'", "√", "⁰", "x_1=", r"\{x:", "(B) ", r"\text{or}", "the answer is ", "No, ", "?", r"\boldsymbol{", r"\\", "**",
    "a" * 40, "1" * 40,
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.characters(), max_size=60).map(lambda parts: "".join(parts)[:2000])


@settings(derandomize=True, max_examples=200, deadline=None)
@given(gold=texts, answer=texts)
@example("18", "18 " + "a" * 1000 + "!")
@example("18", "0." + "1" * 1900)
@example("18", "1" * 900 + "." + "1" * 900 + "x")
@example("18", "," * 2000)
@example("18", "1, " * 600)
@example("18", " " * 1900 + "=")
@example("18", r"\text{ " * 300)
@example("18", "1 " * 1000)
@example("18", "1e999" + "9" * 900)
@example("18", "18 eggs" + "^2 " * 40 + "!")
@example("18", "x=1" + " , and" * 250)
@example("18", "\\\\" * 900 + "x")
@example("18", "no, " * 500)
def test_the_guards_read_any_text_within_half_a_second(gold: str, answer: str) -> None:
    """The random texts are joined from fragments of answers. The examples are texts on which a regular expression could
    be slow."""
    start = time.process_time()
    word(answer)
    claimed(answer)
    readings = read(gold), read(answer, keep_name=False)
    if None not in readings:
        assert refused(*readings) in (True, False)
    assert time.process_time() - start < 0.5
