"""Normalises an answer to the LaTeX that math-verify understands. Gold answers are normalised in the same way.

Unicode characters become LaTeX; styles, sizes and introductory words are removed; numbers are written plainly; sets
defined by a condition, inequalities joined by "or" and named coordinates become intervals and tuples. Units and
equality are handled in `math_guards.py`.
"""

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from string import ascii_letters

from rewards.text import until_closed

_VULGAR = {sign: unicodedata.normalize("NFKC", sign).split("\u2044") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒"}
_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq "}
    | {"≈": r"\approx ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm "}
    | {"⋅": r"\cdot ", "∗": "*", "\u2044": "/", "⩽": r"\le ", "⩾": r"\ge ", "∨": r"\lor ", "ℝ": r"\mathbb{R}"}
    | {"⟨": "(", "⟩": ")", "“": '"', "”": '"', "′": "'", "″": "''", "º": "°"}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
    | {chr(wide): chr(wide - 0xFEE0) for wide in range(0xFF01, 0xFF5F)}  # ４２
    | {sign: rf"\frac{{{above}}}{{{below}}}" for sign, (above, below) in _VULGAR.items()}
)
_BRACKETS = {"lparen": "(", "rparen": ")", "langle": "(", "rangle": ")", "lbrack": "[", "rbrack": "]"}
_BRACKETS |= {"lbrace": r"\{", "rbrace": r"\}"}
_ROOTS = {"√": r"\sqrt", "sqrt": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}

Replacement = str | Callable[[re.Match[str]], str]


def _compiled(*rules: tuple[str, Replacement]) -> list[tuple[re.Pattern[str], Replacement]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


# Styles of letters, which are normalised first.
_STYLES = _compiled(
    (r"[⁰¹²³⁴-⁹⁺⁻]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}"),
    (r"[₀-₉]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}"),
    (
        r"([√∛∜]|(?<![a-zA-Z\\])sqrt)\s*(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|(?=\{))",
        lambda m: _ROOTS[m[1]] + (f"{{{m[2] or m[3]}}}" if m[2] or m[3] else ""),
    ),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
    (r"\{\s*\\(?:bf|rm|it|sf|tt)(?![a-zA-Z])", r"\\text{"),
    (r"\\(?:(?:display|text|script)style|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt)(?![a-zA-Z])", ""),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:boldsymbol|bm|pmb|underline)(?![a-zA-Z])", ""),  # their content keeps its braces
    (
        r"\\(?:text(?:bf|it|rm|sf|tt|sc|normal)?|emph|math(?:rm|bf|it|sf|tt)|mbox|fbox|operatorname)(?![a-zA-Z])",
        r"\\text",
    ),
    (r"\\text\s*\{\s*\\text\s*\{([^{}]*)\}\s*\}", r"\\text{\1}"),
    (r"\\bigcup(?![a-zA-Z])", r"\\cup "),
    (r"\\([lr](?:paren|brack|brace|angle))(?![a-zA-Z])", lambda m: _BRACKETS[m[1]]),
)
_END = re.compile(  # trailing punctuation, but not the dots of 0.333...
    r"(?:[\s,;:~]|(?<![.…])\.|\\[,;:! ]|\\\\|\\q?quad(?![a-zA-Z])|\\text\s*\{[\s.,;]*\})+$"
)
_AROUND = re.compile(r'\$([^$]*)\$|\\\((.*)\\\)|\*\*(.*)\*\*|"([^"]*)"|`([^`]*)`', re.DOTALL)
_LEAD = re.compile(  # \text{The answer is } 42
    r"(?:\\text\s*\{|[A-Za-z,'’\s}])*"
    r"(?:\b(?i:is|are|was|be|equals?|has|have|gets?|needs?|takes?|costs?|exactly|so|thus|hence|therefore|then|answer)\b"
    r"|[a-z]{3}\s*\}?\s*:)[\s:,=}]*"
)
_NEGATED = r"\b(?:not|no|never|neither|cannot|wrong|false)\b|n['’]t\b"
_NEGATION = re.compile(_NEGATED)
DENIED = re.compile(rf"{_NEGATED}|\b(?:less|more|than|at (?:most|least)|between|minus|to)\b")  # at most 18
_CHOICE = re.compile(  # \textbf{(E)}\ 27: the letter of a choice, and its content
    r"(?:\\text\s*\{|\{)?\s*(?:(?i:option|choice)\s+)?(?:\(([A-H])\)[.:]?|([A-H])(?:[.:)]|(?=\s*(?:\}|$))))"
    r"((?:[\s~}:]|\\[ ,;:]|\\q?quad(?![a-zA-Z]))*)"
)
_UNDECIDED = re.compile(r"\([A-H]\)|\b[A-H]\b(?!\s+[a-z])|\b(?:not|wrong|false)\b|^(?:[+*/^=,;]|-\s)")

# math-verify reads 3+4 i as a complex number, but not 3+4i. In 4 mi and in pi, the i is not the imaginary unit.
IMAGINARY = (r"(?<![a-zA-Z\\_^])([a-hj-lnoq-z]?)i(?![a-zA-Z])", r"\1 i ")

# Notation of numbers and signs. The rules apply in this order.
_SPELLING = _compiled(
    (r"\\text\s*\{(?=\s*[-+]?\s*(?:\d|\\[a-zA-Z]))", "{"),  # \mathbf{42}
    (r"^([-+]?)\{([^{}]*)\}", r"\1\2"),
    (r"(?<==)\s*\{([^{}]*)\}", r"\1"),
    # 1\,234 and 10,\!080
    (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|,\\!|\s)\s*\d{3})+(?![\d/])", lambda m: re.sub(r"\D", "", m[0])),
    (r"^(?!\(|\[|\\\{)[^\d,.=]*\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", "")),  # $1,234
    (r"(?<!\\)\\[,;:!]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\not\s*=|\\ne(?![a-zA-Z])", r"\\neq "),
    (r"\\([lg])(?:eq(?:slant|q)?|eqslant)(?![a-zA-Z])", r"\\\1e "),
    (r"^<([^<>]*,[^<>]*)>$", r"(\1)"),
    (r"\\([lg])t(?![a-zA-Z])", lambda m: "<" if m[1] == "l" else ">"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree(?![a-zA-Z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°"),
    (r"\^\s*(?:\\prime|\{\s*((?:\\prime\s*)+)\})", lambda m: "'" * max(1, (m[1] or "").count("prime"))),
    (r'(?<=\d)"', "''"),
    (r"\\%|\\text\s*\{\s*per\s?cent\s*\}|\bper\s?cent\b", "%"),
    (r"(\\text\s*\{[^{}]*\b(?:[cmk]?m|ft|in))([23])(?=\s*\})", r"\1^\2"),  # \text{cm2}
    (r"(\\text\s*\{[^{}]*\^)\s*\{(-?\d)\}", r"\1\2"),  # \text{cm^{2}}
    (r"\\text\s*\{\s*i\s*\}", " i "),
    IMAGINARY,
    # 1e3 and 6.72 \times 10^{-5}, as decimals
    (r"(?<![\w.^/])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", lambda m: _shifted(m[1], m[2])),
    (
        r"(?<![\w.^/])(\d+\.?\d*|\.\d+)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(-?\d{1,3})\s*\}|(\d)(?!\d))",
        lambda m: _shifted(m[1], m[2] or m[3]),
    ),
    # 0.\overline3, 0.1\bar{6}, 0.(3)
    (
        r"(?<!\d)(-?\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))",
        lambda m: _repeating(m[1], m[2], m[3] or m[4] or m[5]),
    ),
    # 0.333\ldots
    (r"(?<!\d)(-?\d+)\.(\d*?)(\d)\3{2,}\s*(?:\\[lc]?dots|\.{3}|…)", lambda m: _repeating(m[1], m[2], m[3])),
    (r"(?<![\d./^_{])(\d+)(?:\\ |\s)+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"(?<=\d)(?:\\ |\s)+(?=\\[dt]?frac)", ""),
    (r"(?<!\\)\\ ", " "),
    (r"^\\text\s*\{([^{}]*\d[^{}]*)\}", r"\1"),  # \text{18 dollars}
)

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_LETTER = r"(?:[a-zA-Z]|\\[a-zA-Z]+)"
INDEX = r"(?:_(?:\w|\{[^{}]*\})|(?<=[a-zA-Z])\d)"
_NAME = rf"{_LETTER}(?:{INDEX})?\s*="  # x =, x_1 =, \theta =
_OR = r"(?:\\text\s*\{[\s,]*or\s*\}|\bor\b|\\(?:lor|vee)(?![a-zA-Z]))"
_AND = rf"(?:[,;]|\\\\|\band\b|\\text\s*\{{[\s,]*and\s*\}}|{_OR})"
_NEXT_NAME = re.compile(rf"{_AND}(?:\s|{_AND})*(?={_NAME})")
_NAMED = re.compile(rf"\s*({_LETTER})((?:{INDEX})?)\s*=([^=<>]+)")
_CONDITION = re.compile(  # \{x \in \mathbb{R} : x<3\}
    r"(?:\\\{|^)\s*([a-zA-Z])\s*(?:\\in\s*(?:\\(?:mathbb|text)\s*)?\{?\s*R\s*\}?\s*)?"
    r"(?::|\||\\(?:mid|colon|vert)(?![a-zA-Z])|\\text\s*\{\s*(?:such that|s\.t\.)\s*\})(?=.*(?:[<>]|\\[lgn]e))"
    r"((?:(?!\\\}).)*(?<![a-zA-Z\\])\1(?![a-zA-Z])(?:(?!\\\}).)*)(?:\\\}|$)",
    re.DOTALL,
)
_RELATION = re.compile(r"(<|>|\\[lg]e(?![a-zA-Z]))")
_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_UNITED = re.compile(rf",?\s*(?:{_OR}|\\cup(?![a-zA-Z]))")


@lru_cache(maxsize=512)
def bare(answer: str) -> str:
    """Return the answer without styles, introductory words, final punctuation, and surrounding dollar signs."""
    answer = answer.strip()
    for pattern, replacement in _STYLES:
        answer = pattern.sub(replacement, answer)
    return _unwrapped(_without_lead(_unwrapped(answer.translate(_CHARACTERS))))


def _unwrapped(answer: str) -> str:
    for _ in range(4):
        shorter = (answer[:-40] + _END.sub("", answer[-40:])).strip()
        around = _AROUND.fullmatch(shorter)
        if around:
            shorter = around[around.lastindex or 0]
        elif shorter.startswith("{") and until_closed(shorter, 1) == shorter[1:-1]:
            shorter = shorter[1:-1]
        if shorter == answer:
            break
        answer = shorter
    return answer


def _without_lead(answer: str) -> str:
    lead = _LEAD.match(answer)
    if lead is None or lead.end() == len(answer) or _NEGATION.search(lead[0].lower()):
        return answer
    return _rest(answer, lead.end())


def _rest(answer: str, start: int) -> str:
    r"""Return the answer from index `start` on. If `start` is inside a \text{...}, prepend an opening \text{."""
    opened = answer.count("{", 0, start) > answer.count("}", 0, start)
    return (r"\text{" if opened else "") + answer[start:]


def choice(answer: str) -> tuple[str, str]:
    """Split a bare answer into the letter of the choice at its beginning and the rest.

    The letter is "" if the answer does not begin with the letter of exactly one choice.
    """
    matched = _CHOICE.match(answer)
    if matched is None:
        return "", answer
    rest = _rest(answer, matched.end())
    if rest and (not (matched[3] or rest[0].isdigit()) or _UNDECIDED.search(rest)):
        return "", answer
    return matched[1] or matched[2], rest


def spelt(answer: str) -> str:
    latex = bare(answer)
    rest = choice(latex)[1]
    if re.match(r"[\d\\.-]|\{?\d", rest):
        latex = rest
    for pattern, replacement in _SPELLING:
        latex = pattern.sub(replacement, latex).strip()
    return _union(_CONDITION.sub(r"\2", _coordinates(latex)))  # \{x : x<3\} is x<3


def _coordinates(latex: str) -> str:
    """Turn x=2, y=-3 into (2,-3), in the order of the names if these are consecutive letters; x=2 or x=-3 into 2,-3."""
    inside = re.sub(r"^\(|\)$|^\\\{|\\\}$|\\(?:begin|end)\s*\{cases\}", "", latex)
    parts = [_NAMED.fullmatch(part) for part in _NEXT_NAME.split(inside)]
    named = [(part[1], len(part[2]), part[2], part[3].strip()) for part in parts if part]
    names = {name[:3] for name in named}
    is_list = len(names) == 1 or bool(re.search(_OR, latex))
    if len(parts) < 2 or len(named) < len(parts) or not (is_list or len(names) == len(named)):
        return latex
    if "".join(sorted({letter for letter, *_ in named})) in ascii_letters:
        named.sort()
    values = ",".join(value for *_, value in named)
    return values if is_list else f"({values})"


def _union(latex: str) -> str:
    r"""Turn inequalities joined by "or", which math-verify takes for a list, into a union of intervals.

    For example, x<2 or 3<x\le4 becomes (-\infty,2) \cup (3,4].
    """
    if not _RELATION.search(latex) or not _UNITED.search(latex):
        return latex
    intervals = [_interval(part) for parts in _UNITED.split(latex) for part in parts.split(",")]
    matched = [interval for interval in intervals if interval]
    if len(matched) < len(intervals) or len({variable for variable, _ in matched}) > 1:
        return latex
    return r" \cup ".join(interval for _, interval in matched)


def _interval(latex: str) -> tuple[str, str] | None:
    r"""Return the variable and the interval of an inequality such as x<2 or 3<x\le4, or None for any other text."""
    pieces = [piece.strip() for piece in _RELATION.split(latex)]
    if not {">", r"\ge"}.isdisjoint(pieces):  # written from right to left
        pieces = [_MIRRORED.get(piece, piece) for piece in reversed(pieces)]
    if len(pieces) == 3:
        pieces = [r"-\infty", "<", *pieces] if pieces[0].isalpha() else [*pieces, "<", r"\infty"]
    if len(pieces) != 5 or not {">", r"\ge"}.isdisjoint(pieces) or not re.fullmatch("[a-zA-Z]", pieces[2]):
        return None
    low, left, variable, right, high = pieces
    return variable, f"{'(' if left == '<' else '['}{low},{high}{')' if right == '<' else ']'}"


def number_of(latex: str) -> Fraction | None:
    """Return the exact value of a decimal or of a simple fraction, or None for any other text."""
    if NUMBER.fullmatch(latex):
        return Fraction(latex)
    fraction = _FRACTION.fullmatch(latex)
    if fraction is None or not int(fraction[3]):
        return None
    return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] == "-" else 1)


def latex_of(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _shifted(digits: str, exponent: str) -> str:
    return format(Decimal(f"{digits}e{exponent}"), "f")


def _repeating(whole: str, head: str, period: str) -> str:
    nines = (10 ** len(period) - 1) * 10 ** len(head)
    value = abs(int(whole)) + Fraction(int(head + period) - int(head or "0"), nines)
    return latex_of(-value if whole.startswith("-") else value)
