r"""The process that runs math-verify. It reads requests as JSON, one per line, and writes one JSON reply per line.

    {"op": "gold",  "gold": G, "limit": seconds}                       -> {"ok": true if G can be parsed}
    {"op": "score", "gold": G, "answer": [kind, A], "limit": seconds}  -> {"ok": true if A equals G}

G is the gold answer and A the answer to score. The kind of A is "box" if A is a bare answer, "line" if it begins with
one, or "text" if A is prose. {"ok": null} means that the request took longer than its limit in processor time: an alarm
ended the process, which works even inside one long C call (10^10^10), and its parent starts the next one (workers.py).

Answers are rewritten for math-verify, and what it would wrongly accept is refused: docs/rewards.md lists the main
guards.
"""

import json
import logging
import os
import re
import resource
import signal
import socket
import unicodedata
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, reduce
from itertools import takewhile
from string import ascii_letters
from typing import Any, NamedTuple

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, verify

from rewards.text import closing
from rewards.workers import answer_requests

MEMORY_LIMIT = 2 * 2**30  # bytes of address space; 10^10^10 alone would need 4 GiB
RELATION = re.compile(r"[<>]|\\(?:[lg]e|neq)(?![a-zA-Z])")
OR = r"(?:\\text\s*\{[\s,]*or\s*\}|\bor\b|\\(?:lor|vee)(?![a-zA-Z]))"
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
_BRACKETS = {"paren": ("(", ")"), "angle": ("(", ")"), "brack": ("[", "]"), "brace": (r"\{", r"\}")}
_ROOTS = {"√": r"\sqrt", "sqrt": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_FUNCTIONS = "(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|max|min|gcd|lcm|det"
EQUALS = "≔"  # stands for = in the index of a sum, where it is no relation


def latex_of(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _repeating(decimal: re.Match[str]) -> str:
    whole, head, *periods = decimal.groups()
    period = next(filter(None, periods))
    nines = (10 ** len(period) - 1) * 10 ** len(head)
    value = abs(int(whole)) + Fraction(int(head + period) - int(head or "0"), nines)
    return latex_of(-value if whole.startswith("-") else value)


# Styles of letters, which are normalised first.
_STYLES: list[tuple[str, Any]] = [
    (r"[⁰¹²³⁴-⁹⁺⁻]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}"),
    (r"[₀-₉]+", lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}"),
    (
        r"([√∛∜]|(?<![a-zA-Z\\])sqrt)\s*(?:(\d+(?:\.\d+)?|[a-zA-Z])|\(([^()]*)\)|(?=\{))",
        lambda m: _ROOTS[m[1]] + (f"{{{m[2] or m[3]}}}" if m[2] or m[3] else ""),
    ),
    (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
    (r"\{\s*\\(?:bf|rm|it|sf|tt)(?![a-zA-Z])", r"\\text{"),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:boldsymbol|bm|pmb|underline)(?![a-zA-Z])", ""),  # their content keeps its braces
    (r"\\(?:(?:text|math)(?:bf|it|rm|sf|tt|sc|normal)?|emph|mbox|fbox|operatorname)(?![a-zA-Z])", r"\\text"),
    (rf"\\text\s*\{{\s*({_FUNCTIONS})\s*\}}(?=.)", r"\\\1 "),  # \mathrm{ln}\,2
    (r"\\text\s*\{\s*(e|\\pi)\s*\}", r"\1 "),
    (r"\\([lr])(paren|brack|brace|angle)(?![a-zA-Z])", lambda m: _BRACKETS[m[2]][m[1] == "r"]),
]
_END = re.compile(  # trailing punctuation, but not the dots of 0.333...
    r"(?:[\s,;:~]|(?<![.…])\.|\\[,;:! ]|\\\\|\\q?quad(?![a-zA-Z])|\\text\s*\{[\s.,;]*\})+$"
)
_AROUND = re.compile(r'\$([^$]*)\$|\\\((.*)\\\)|\*\*(.*)\*\*|"([^"]*)"|`([^`]*)`', re.DOTALL)
_LEAD = re.compile(  # \text{The answer is } 42
    r"(?:\\text\s*\{|[A-Za-z,'’\s}])*"
    r"(?:\b(?i:is|are|was|be|equals?|has|have|gets?|needs?|takes?|costs?|exactly|so|thus|hence|therefore|then|answer)\b"
    r"|[a-z]{3}\s*\}?\s*:)[\s:,=}]*"
)
_NEGATION = re.compile(r"\b(?:not|no|never|neither|cannot|wrong|false)\b|n['’]t\b")
DENIED = re.compile(rf"{_NEGATION.pattern}|\b(?:less|more|than|at (?:most|least)|between|minus|to)\b")  # at most 18
_CHOICE = re.compile(  # \textbf{(E)}\ 27: the letter of a choice, and its content
    r"(?:\\text\s*\{|\{)?\s*(?:(?i:option|choice)\s+)?(?:\(([A-H])\)[.:]?|([A-H])(?:[.:)]|(?=\s*(?:\}|$))))"
    r"((?:[\s~}:]|\\[ ,;:]|\\q?quad(?![a-zA-Z]))*)"
)
_UNDECIDED = re.compile(r"\([A-H]\)|\b[A-H]\b(?!\s+[a-z])|\b(?:not|wrong|false)\b|^(?:[+*/^=,;]|-\s)")
# math-verify reads 3+4 i as a complex number, but not 3+4i. In 4 mi and in pi, the i is not the imaginary unit.
IMAGINARY = (r"(?<![a-zA-Z\\_^])([a-hj-lnoq-z]?)i(?![a-zA-Z])", r"\1 i ")
_NAMED_FUNCTION = re.compile(r"(?<![a-zA-Z\\])((?:arc)?(?:sin|cos|tan)h?|cot|ln|log|exp|pi)(?![a-zA-Z])")  # ln 2, 2*pi
_REALS = {"": r"\mathbb{R} ", "nonzero": r"\mathbb{R} \setminus \{0\} "}
_REALS |= {"positive": r"(0,\infty) ", "nonnegative": r"[0,\infty) "}
_FOR_ALL = "(?:for (?:all|any|every|each)|where)(?: reals?)?(?: numbers?)?"
_MEMBER = r"(?:\s|\\text\s*\{\s*|\$)*[a-z](?:\s*\\in\s*(?:\\(?:mathbb|text)\s*)?\{?\s*[A-Z]\s*\}?)?[\s}$]*"
# Notation of numbers and signs. The rules apply in this order.
_SPELLING: list[tuple[str, Any]] = [
    (r"(?:^|\{)([^{}]*?)\\choose(?![a-zA-Z])([^{}]*)(?:\}|$)", r"\\binom{\1}{\2}"),
    (  # all real numbers except 2
        r"^(?:\\text\s*\{)?\s*(?i:(?:(?:all|any|every|the set of|the)\s+)*(positive|non-?negative|non-?zero)?\s*"
        r"(?:reals|real (?:numbers?|values?)))(?:\s+(?:except|excluding|other than)(?: for)?[\s}]*([^{}]+))?[\s.}]*$",
        lambda m: _REALS[(m[1] or "").lower().replace("-", "")] + (rf"\setminus \{{{m[2]}\}}" if m[2] else ""),
    ),
    (r"^(?:\\text\s*\{)?\s*(?i:the )?(?i:point)[\s}]*(?=\()", ""),
    (r"^(?:\\text\s*\{)?\s*(?i:all|any) reals?(?: numbers?)?[\s}]*(?=[a-z]\s*\\neq?)", ""),  # all real x \neq 2
    (r"^(?:\\text\s*\{)?\s*(?i:no (?:real )?solutions?(?: exists?)?|(?:the )?empty set)[\s.}]*$", r"\\emptyset "),
    (r"\\text\s*\{(?=\s*[-+]?\s*(?:\d|\\[a-zA-Z]))", "{"),  # \mathbf{42}
    (r"^([-+]?)\{([^{}]*)\}", r"\1\2"),
    # 1\,234 and 10,\!080
    (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|,\\!|\s)\s*\d{3})+(?![\d/])", lambda m: re.sub(r"\D", "", m[0])),
    (r"^(?!\(|\[|\\\{)[^\d,.=]*\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", "")),  # $1,234
    (r"(?<!\\)\\[,;:!]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"_\s*\{[^{}=]*=[^{}]*\}", lambda m: m[0].replace("=", EQUALS)),  # \sum_{k=1}
    (r"\\[a-z]{1,4}frac(?![a-zA-Z])", r"\\frac"),  # \nicefrac
    (r"\*\*\s*(?:\(([^()]*)\)|(-?\d+|[a-zA-Z]))", lambda m: f"^{{{m[1] or m[2]}}}"),  # x**2
    (r"^\](?=[^()\[\]]*,[^()\[\]]*[)\[\]]$)", "("),  # ]2,5[
    (r"(?<=^[(\[])([^()\[\]]*,[^()\[\]]*)\[$", r"\1)"),
    (r"^\\\{\s*(\([^()]*\))\s*\\\}$", r"\1"),  # \{(1,2)\}
    (r"(?:\\[lc]?dots(?![a-zA-Z])|\.{3}|…)", r"\\ldots "),
    (r"\\not\s*=|\\ne(?![a-zA-Z])", r"\\neq "),
    (r"\\([lg])(?:eq(?:slant|q)?|eqslant)(?![a-zA-Z])", r"\\\1e "),
    (r"\\([lg])t(?![a-zA-Z])", lambda m: "<" if m[1] == "l" else ">"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree(?![a-zA-Z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°"),
    (r"\^\s*(?:\\prime|\{\s*((?:\\prime\s*)+)\})", lambda m: "'" * max(1, (m[1] or "").count("prime"))),
    (r'(?<=\d)"', "''"),
    (r"\\%|\\text\s*\{\s*per\s?cent(?:age points?)?\s*\}|\bper\s?cent(?:age points?)?\b", "%"),
    (r"(\\text\s*\{[^{}]*\^)\s*\{(-?\d)\}", r"\1\2"),  # \text{cm^{2}}
    (r"\\text\s*\{\s*i\s*\}", " i "),
    IMAGINARY,
    (r"\\(?:overline|bar)\s*\{([^{}]* i [^{}]*)\}", lambda m: f"({m[1].replace(' i ', '(- i )')})"),
    (r"(?<![\w.^/])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])", lambda m: format(Decimal(m[0]), "f")),  # 1e3
    # 0.\overline3, 0.1\bar{6}, 0.(3) and 0.333\ldots
    (r"(?<!\d)(-?\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\))", _repeating),
    (r"(?<!\d)(-?\d+)\.(\d*?)(\d)\3{2,}\s*(?:\\[lc]?dots|\.{3}|…)", _repeating),
    (r"(?<![\d./^_{])(\d+)(?:\\ |\s)+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"(?<!\\)\\ ", " "),
    # f(x)=x \text{ for all } x \in \mathbb{R}, and k\pi, k \in \mathbb{Z}
    (rf"(?<=[^\s,])[\s,]*(?:\\text\s*\{{\s*{_FOR_ALL}\s*\}}|{_FOR_ALL}|\\forall)\s*{_MEMBER}$", ""),
    (r"(?<=[^\s,])[\s,]+[a-z]\s*\\in\s*\\(?:mathbb|text)\s*\{?\s*[ZR]\s*\}?$", ""),
    (r"(?<![a-zA-Z\\])[mnl](?=\s*\\pi)", "k"),
    (r"^(?!.*\\text)(.*)$", lambda m: _NAMED_FUNCTION.sub(r"\\\1 ", m[1])),
    (r"^.*\\(?:sin|cos|tan|cot|sec|csc).*$", lambda m: re.sub(r"([\d.]+)\s*°", r"{\\frac{\1\\pi}{180}}", m[0])),
]
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
_RATIONAL = re.compile(rf"{NUMBER.pattern}|[-+]?{_FRACTION.pattern}")
_LETTER = r"(?:[a-zA-Z]|\\[a-zA-Z]+)"
INDEX = r"(?:_(?:\w|\{[^{}]*\})|(?<=[a-zA-Z])\d)"
_NAME = rf"{_LETTER}(?:{INDEX})?\s*="  # x =, x_1 =, \theta =
_AND = rf"(?:[,;]|\\\\|\band\b|\\text\s*\{{[\s,]*and\s*\}}|{OR})"
_NEXT_NAME = re.compile(rf"{_AND}(?:\s|{_AND})*(?={_NAME})")
_NAMED = re.compile(rf"\s*({_LETTER})((?:{INDEX})?)\s*=([^=<>]+)")


@lru_cache(maxsize=512)
def bare(answer: str) -> str:
    """Return the answer without styles, introductory words, final punctuation, and surrounding dollar signs."""
    answer = answer.strip()
    for pattern, replacement in _STYLES:
        answer = re.sub(pattern, replacement, answer)
    answer = _unwrapped(answer.translate(_CHARACTERS))
    lead = _LEAD.match(answer)
    if lead and lead.end() < len(answer) and not _NEGATION.search(lead[0].lower()):
        answer = _unwrapped(_rest(answer, lead.end()))
    return answer


def _unwrapped(answer: str) -> str:
    for _ in range(4):
        shorter = (answer[:-40] + _END.sub("", answer[-40:])).strip()
        around = _AROUND.fullmatch(shorter)
        if around:
            shorter = around[around.lastindex or 0]
        elif shorter.startswith("{") and closing(shorter, 1) == len(shorter) - 1:
            shorter = shorter[1:-1]
        if shorter == answer:
            break
        answer = shorter
    return answer


def _rest(answer: str, start: int) -> str:
    r"""Return the answer from index `start` on. If `start` is inside a \text{...}, prepend an opening \text{."""
    opened = answer.count("{", 0, start) > answer.count("}", 0, start)
    return (r"\text{" if opened else "") + answer[start:]


def choice(answer: str) -> tuple[str, str]:
    """Return (letter of the choice at the beginning of a bare answer, rest). The letter is "" unless there is one."""
    if matched := _CHOICE.match(answer):
        rest = _rest(answer, matched.end())
        if not rest or ((matched[3] or rest[0].isdigit()) and not _UNDECIDED.search(rest)):
            return matched[1] or matched[2], rest
    return "", answer


def spelt(answer: str) -> str:
    latex = bare(answer)
    if re.match(r"[\d\\.-]|\{?\d", rest := choice(latex)[1]):
        latex = rest
    for pattern, replacement in _SPELLING:
        latex = re.sub(pattern, replacement, latex).strip()
    # x=2, y=-3 becomes (2,-3), in the order of the names if these are consecutive letters, and x=2 or x=-3 becomes 2,-3
    inside = re.sub(r"^\(|\)$|^\\\{|\\\}$|\\(?:begin|end)\s*\{cases\}", "", latex)
    equations = [_NAMED.fullmatch(part) for part in _NEXT_NAME.split(inside)]
    named = [(part[1], len(part[2]), part[2], part[3].strip()) for part in equations if part]
    names = {name[:3] for name in named}
    is_list = len(names) == 1 or bool(re.search(OR, latex))
    if len(equations) < 2 or len(named) < len(equations) or not (is_list or len(names) == len(named)):
        return latex
    if "".join(sorted({letter for letter, *_ in named})) in ascii_letters:
        named.sort()
    coordinates = ",".join(value for *_, value in named)
    return coordinates if is_list else f"({coordinates})"


def number_of(latex: str) -> Fraction | None:
    """Return the exact value of a decimal or of a simple fraction, or None for any other text."""
    with suppress(ValueError, ZeroDivisionError):  # --1, 1/0
        return Fraction(_FRACTION.sub(r"\1/\2", latex)) if _RATIONAL.fullmatch(latex) else None
    return None


# The spellings of each unit, of which the last is its name. Letters after a number are a unit, not a variable, if they
# are in \text, name a known unit, or are a word after a space: 18 eggs, but not 18x.
_SPELLINGS = (
    "m metre meter|km kilometre kilometer|cm centimetre centimeter|mm millimetre millimeter|in inches inch|ft feet foot"
    "|yd yard|mi mile|g gm gram|kg kilogram|mg milligram|lb lbs pound|oz ounce|l litre liter|ml milliliter|s sec second"
    "|min minute|h hr hour|day|week|rad radian|° deg degree|$ usd us$ dollar|¢ cent|€ eur euro|£ gbp|¥ yen|₹ rupee|hz"
    "|n newton|j joule|w watt|v volt|c celsius|k kelvin|/ per|%|'|''|unit|people men women children mice fish sheep"
)
_UNIT = {spelling: names.split()[-1] for names in _SPELLINGS.split("|") for spelling in names.split()}
_UNIT["mph"] = "mile hour^-1"
_CONVERSIONS = (
    "kilometer 1000 meter|centimeter 1/100 meter|millimeter 1/1000 meter|foot 12 inch|yard 36 inch|mile 63360 inch"
    "|kilogram 1000 gram|milligram 1/1000 gram|ounce 1/16 pound|milliliter 1/1000 liter|cent 1/100 dollar"
    "|minute 60 second|hour 3600 second|day 86400 second|week 604800 second"
)
_SIZES = {unit: (size, base) for unit, size, base in map(str.split, _CONVERSIONS.split("|"))}
_POWER = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_SCALE = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ASIDE = {"of", "each", "in", "for", "from", "total", "left", "old", "tall", "long", "wide", "high", "deep", "away"}
# Words after a number that change its value, or deny that it is the answer: 18 squared, 18 thirds, 18 is wrong.
_CHANGING = re.compile(
    r"half|halves|quarters?|\w+(?:nd|rd|th)s|times|plus|minus|over|and|or|to|not|is|are|was|than|wrong|point|factorial|"
    "negative|sin|cos|tan|log|ln|exp|sqrt|pi|mod|modulo|base|choose|except|without|if|but|hence|only|too|short|tens|"
    "(?:dozen|hundred|thousand|million|billion|trillion|zero)s?|more|less|fewer|greater|below|above|under|off|discount|"
    "(?:low|high|small|larg|bigg|cheap|dear)er|(?:in|de)crease|reduction|decline|drop|rise|gain|loss"  # 42 percent less
)
_CURRENCY = re.compile(r"([-+]?)\s*(?:\\text\s*\{\s*)?(US\s*\\?\$|\\?\$|[€£¥₹]|USD|EUR|GBP)\s*\}?\s*(?=[-+\d.])")
_NUMBER_PART = r"""(?:[^"'A-Za-z\\°%¢]|\\[^A-Za-z]|\\[A-Za-z]+)*"""
_UNIT_POWER = r"\^\s*(?:-?[1-9]|\{\s*-?[1-9]\s*\})"
_UNIT_TEXT = rf'"(?:[^"\d^]|{_UNIT_POWER})*"|{_UNIT_POWER}'
_UNIT_PART = re.compile(rf"(?:{_UNIT_TEXT}|[A-Za-z°%¢/'\s.-])+")
_UNIT_START = re.compile(r"""["'°%¢]|(?:cm|mm|km|kg|mph|ft|in|lbs?|hr|min|sq|cu)\b|(?<=\s)[A-Za-z]{3,}""")
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{((?:{_UNIT_TEXT}|\s)+)\}}\s*\{{((?:{_UNIT_TEXT}|\s)+)\}}")
_IN_PARENTHESES = re.compile(rf"\(((?:{_UNIT_TEXT}|[A-Za-z°%¢/\s.-])+)\)$")  # 42 (people)
_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(?:\{\s*(\d+)\s*\}|(\d+))")
_RADIANS = re.compile(r"(?<!\}\{)(?<!/)\\pi")  # \frac{\pi}{6}, but not \frac{180}{\pi}
_RANGE = re.compile(r"^[(\[].*[)\]]$|\\(?:cup|infty|in|mathbb|setminus)(?![a-zA-Z])", re.DOTALL)
_BRACKET = r"\\[{}]|[()\[\]{}]"
_COMMA = r"[,;]?\s*(?:\\text\s*\{[\s,]*(?:and|or)\s*\}|\b(?:and|or)\b)|[,;]"


def parts(latex: str, separator: str) -> list[str]:
    """Split LaTeX at the separators that are outside of all brackets."""
    pieces, start, depth = list[str](), 0, 0
    for mark in re.finditer(rf"(?P<separator>{separator})|{_BRACKET}", latex):
        if not mark["separator"]:
            depth += 1 if mark[0][-1] in "([{" else -1
        elif depth == 0:
            pieces.append(latex[start : mark.start()])
            start = mark.end()
    return [*pieces, latex[start:]]


class Reading(NamedTuple):
    """An answer for math-verify, and the unit and the base that were removed from it ("" if it had none)."""

    latex: str
    unit: str = ""  # canonical names with powers: "inch^2", "%", "mile hour^-1"
    base: str = ""


def read(answer: str, *, keep_name: bool = True) -> Reading | None:
    """Normalise an answer, without x= unless `keep_name`. None means that a word after the number changes its value."""
    latex = spelt(answer)
    name, equals, value = latex.partition("=")
    name = re.sub(INDEX, "", name)
    if equals and not keep_name and re.search(r"[a-zA-Z]", name) and not re.search(r"\d|[<>]|\\[lgn]eq?\b", name):
        latex = value
    exact, _, _ = latex.partition(r"\approx")  # 14/3 \approx 4.67
    name, equals, value = (exact if re.search(r"\d", exact) else latex).rpartition("=")
    reading = _quantity(value.strip())
    return reading and reading._replace(latex=name + equals + reading.latex)


def _quantity(latex: str) -> Reading | None:
    money = _CURRENCY.match(latex)
    unit = ""
    if money:
        sign = money[2].lower().replace(" ", "").replace("\\", "")
        unit, latex = _UNIT.get(sign, sign), money[1] + latex[money.end() :]
    based = _BASED.fullmatch(latex)
    if based:
        return Reading(based[1], unit, based[2] or based[3])
    quoted = re.sub(r"\\text\s*\{([^{}]*)\}", r'"\1"', latex)
    quoted = re.sub(r'(?:(/)|\\cdot|\\times)\s*"', r'"\1', quoted)
    quoted = _IN_PARENTHESES.sub(r" \1", _UNIT_FRACTION.sub(r"\1/\2", quoted))
    end = len(re.match(_NUMBER_PART, quoted)[0])  # type: ignore[index]  # it always matches, if only nothing
    value, words = quoted[:end].strip(), quoted[end:]
    if not re.search(r"\d|\\pi", value) or not _UNIT_START.match(quoted, end) or not _UNIT_PART.fullmatch(words):
        return Reading(latex, unit)
    tokens = re.findall(r"[a-z]+|'+|[°%¢/]|\^-?[1-9]", re.sub(r"[{}]", "", words.lower()))
    while tokens and (scale := _SCALE.get(tokens[0].removesuffix("s"))):  # 18 million
        scaled = number_of(value)
        if scaled is None:
            return None
        value, tokens = latex_of(scaled * scale), tokens[1:]
    return Reading(value, _one_name(tokens) or unit) if _may_follow(tokens) else None


def _may_follow(tokens: list[str]) -> bool:
    """Return True if the words after a number are a unit or a plural: things that are counted."""
    if any(map(_CHANGING.fullmatch, tokens)) or (len(tokens) == 1 and tokens[0] in ("squared", "cubed")):
        return False
    head = list(takewhile(lambda token: token not in _ASIDE and _UNIT.get(token) != "per", tokens))
    while head and (head[-1] in _POWER or head[-1][0] == "^"):
        head.pop()
    return not head or head[0] == "%" or head[-1] in _UNIT or bool(re.fullmatch(r"\w{2,}[^su\W]s", head[-1]))


def measure(unit: str) -> tuple[Fraction, str]:
    """Return (size, unit in which it is measured): (1000000, meter^2) for kilometer^2."""
    size, words = Fraction(1), list[str]()
    for factor in unit.split():
        name, caret, power = factor.partition("^")
        amount, base = _SIZES.get(name, ("1", name))
        size *= Fraction(amount) ** int(power or 1)
        words.append(base + caret + power)
    return size, " ".join(words)


def _one_name(tokens: list[str]) -> str:
    """Return the canonical name of a unit. For example, sq in, square inches and inches^2 all become inch^2."""
    powers: dict[str, int] = {}
    name, sign, ahead = "", 1, 1
    for place, token in enumerate(tokens):
        power = _POWER.get(token) or (int(token[1:]) if token[0] == "^" else 0)
        if place and token in _ASIDE:
            break
        if power and token[:2] in ("sq", "cu") and token[-1] != "d":
            ahead = power
        elif power:
            powers[name] = powers.get(name, 1) * power
        elif _UNIT.get(token) == "per":
            sign = -1
        else:
            plain = token[:-1] if len(token) > 2 and token.endswith("s") and token not in _UNIT else token
            name = _UNIT.get(token) or _UNIT.get(plain, plain)
            powers[name], ahead = sign * ahead, 1
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in powers.items() if name)


def word(answer: str) -> str | None:
    r"""Return the answer in lower case if it is a word or the letter of a choice. None means that it is mathematics.

    math-verify reads a word as a product of letters. A word has four letters or more, \text, capitals, or e, i, o or u.
    """
    plain = bare(answer)
    text = re.fullmatch(r"\\text\s*\{([^{}\\]*)\}", plain)
    plain = re.sub(r"^(?i:an?|the)\s+", "", (text[1] if text else plain).strip(" .\"'"))
    if re.fullmatch(r"\([A-H]\)|[A-H]", plain):
        return plain.strip("()").lower()
    if not re.fullmatch(r"[^\W\d_]+", plain) or (plain in ("pi", "infinity") and not text):
        return None
    wordy = len(plain) >= 4 or (len(plain) > 1 and (plain.isupper() or re.search("[eiouEIOU]", plain)))
    return plain.lower() if wordy or text else None


def refused(gold: Reading, response: Reading) -> bool:
    """Return True if the two answers differ in something that math-verify does not check."""
    units = {measure(gold.unit)[1], measure(response.unit)[1]}
    value = response.latex if "=" in gold.latex else response.latex.rpartition("=")[2]  # f'(2) = 15
    return bool(
        # refuses inches^2 for inches^3, but not cm^2 for square units
        (len(units) == 2 and "" not in units and "unit" not in {unit.partition("^")[0] for unit in units})
        or (response.base and response.base != (gold.base or "10"))  # 4343_7 and 4343_6
        or (gold.base and gold.latex.lstrip("0") != response.latex.lstrip("0"))
        or (RELATION.search(response.latex) and not RELATION.search(gold.latex) and not _RANGE.search(gold.latex))
        or (r"\ldots" in gold.latex) != (r"\ldots" in response.latex)
        or (DENIED.search(response.latex.lower()) and not DENIED.search(gold.latex.lower()))  # at most 18
        or gold.latex.count("'") != value.count("'")  # y' and y
        or (
            _RADIANS.search(gold.latex)
            and re.search("degree|^'|°", response.unit + response.latex)
            and gold.unit != "degree"
        )
        or _shapes_differ(gold.latex, response.latex)
    )


def _shapes_differ(gold: str, response: str) -> bool:
    if RELATION.search(gold + response) or re.search(r"\\(?:pm|in|cup)(?![a-zA-Z])", gold + response):
        return False
    gold, response = (text.rpartition("=")[2].strip() for text in (gold, response))
    pairs, response_pairs = (
        sorted(re.findall(r"([(\[])[^()\[\]]*,[^()\[\]]*([)\]])", text)) for text in (gold, response)
    )
    if pairs and response_pairs and pairs != response_pairs:
        return True  # (1,2) and [1,2]
    (brackets, count), (response_brackets, response_count) = _shape(gold), _shape(response)
    if brackets == response_brackets == "":
        return count != response_count  # 1,2 and 1,2,2
    allowed = {"()": ["()"], r"\{\}": [r"\{\}", ""]}.get(brackets, [response_brackets])
    return 1 not in (count, response_count) and response_brackets not in allowed  # (1,2) and 1,2


def _shape(latex: str) -> tuple[str, int]:
    """Return (brackets around the whole answer, or "", and number of elements of the list)."""
    around = re.fullmatch(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", latex, re.DOTALL)
    whole = around if around and len(parts(latex, _COMMA)) == 1 else None
    elements = parts(whole[2] if whole else latex, _COMMA)
    return whole[1] + whole[3] if whole else "", sum(bool(element.strip()) for element in elements)


def values(gold: Reading, response: Reading) -> list[str]:
    r"""Return the possible values of the answer as LaTeX, of which one must equal the gold answer. If only one has a
    percent sign, 18\% equals 18, 25\% equals 1/4, and 12.5 and 0.125 equal 12.5\%."""
    point = re.fullmatch(r"([A-Z])\s*(\((.*),(.*)\))", response.latex)
    if point and ("," in gold.latex or point[1] == "C"):  # P(1,2), and C(10,2)
        return [point[2] if "," in gold.latex else rf"\binom{{{point[3]}}}{{{point[4]}}}"]
    units, latex = (gold.unit, response.unit), response.latex
    if units == ("degree", "") and re.search(r"\\(?:pi|arc)", latex):
        return [latex, rf"\frac{{180}}{{\pi}} \cdot ({latex})"]
    if all(units):  # 1 km and 1000 m
        ratio = measure(response.unit)[0] / measure(gold.unit)[0]
        return [latex if ratio == 1 else rf"{latex_of(ratio)} \cdot ({latex})"]
    if gold.unit == "%":  # 12.5\% and 0.125
        return [latex, rf"100 \cdot ({latex})"]
    hundredths = response.unit == "%" and abs(number_of(gold.latex) or Fraction(0)) < 1
    return [rf"\frac{{{latex}}}{{100}}" if hundredths else latex]


_MENTION = r"(?:\$[^$\n]{0,200}\$|\\\([^\n]{0,200}?\\\)|(?<![\d.,/%])[-$€£]?\d[\d.,/%]*)"
_DENIED_MENTION = re.compile(
    rf"(?:\bnot|\bnever|\bcannot|n['’]t)\s+(?:(?:be|equal(?: to)?|the answer)\s+){{0,2}}{_MENTION}"
    rf"|{_MENTION}\s*\?(?!\W*(?i:yes)\b)"
)
_TAKEN_BACK = re.compile(  # No, it is 19
    r"\b(?i:(?:(?:no|wait|actually|sorry|correction|oops)[,.:;!—–]\s*){1,3}|(?:or rather|i mean|make that),?\s+)"
    r"(?i:(?:it|that|this|the (?:\w+ )?answer)(?:['’]s| is| must be| should be)\s+)?"
    rf"(?={_MENTION})"
)


def claimed(text: str) -> str:
    """Return the text without the numbers that it denies, questions or takes back: "The answer is not 18." loses 18."""
    text = _DENIED_MENTION.sub(" ", re.sub(*IMAGINARY, text))
    taken_back = list(_TAKEN_BACK.finditer(text))
    return "The answer is " + text[taken_back[-1].end() :] if taken_back else text


_COMMANDS = re.compile(r"\\(?:text|mbox|textbf|textit|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+")
_REASON = re.compile(r"[.,;]?\s+(?:because|since|as|which)\b|\.\s+(?=[A-Z])")  # 42, because 6 * 7 = 42


def is_prose(text: str) -> bool:
    """Return True if two words stand side by side outside of LaTeX commands, as in a sentence but not in xy + yz."""
    return bool(re.search(r"[^\W\d_]{2,}\s+(?:[^\W\d_]\s+)?[^\W\d_]{2,}", _COMMANDS.sub("|", text)))


def parse(source: str) -> list:
    """Parse a text with math-verify. Return [], or a list of expressions, which may end with the source as a string."""
    # Do not use math-verify's units: it takes any last letter for a unit, and drops both inches^2 and million.
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="all")
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=spelling)
    # Do not use math-verify's timeout: it is a signal that cannot interrupt C code, and it restarts for every pair.
    parsed = math_verify.parse(source.replace(EQUALS, "="), [latex, ExprExtractionConfig()], parsing_timeout=None)
    return [_complex(part) for part in parsed]


def _complex(part: Any) -> Any:
    """Return an expression of math-verify with the imaginary unit, which math-verify reads as a symbol."""
    try:
        return part if part.has(sympy.Sum, sympy.Product) else part.xreplace({sympy.Symbol("i", real=False): sympy.I})
    except (AttributeError, ValueError, TypeError):  # text, or (3+4i, 2) as an interval
        return part


@lru_cache(maxsize=512)
def parse_box(latex: str) -> list:
    return parse(rf"\boxed{{{latex}}}")


@lru_cache(maxsize=512)
def read_gold(box: str) -> Reading:
    box = box.rpartition("####")[2].strip()  # raw solutions of GSM8K
    return read(rf"\text{{{box}}}" if word(box) is not None and not box.startswith("\\") else box) or Reading(box)


def parse_gold(latex: str) -> list:
    """Parse a normalised gold answer. Return [] if it contains no expression that can be compared by value."""
    parsed = [] if is_prose(latex) and not re.search(r"\d", latex) else parse_box(latex)
    return parsed if any(not isinstance(part, str) for part in parsed) else []


_EITHER = rf",?\s*(?:{OR}|\\cup(?![a-zA-Z]))"
_BOTH = r"[,;]?\s*(?:\\text\s*\{[\s,]*(?:and|but)\s*\}|\b(?:and|but)\b|\\(?:land|wedge|cap)(?![a-zA-Z]))|[,;]"
_MINUS = r"(?:\\setminus|\\backslash|-)\s*(?=\\\{)"
_ALL_REALS = r"(?:\\(?:mathbb|text)\s*)?\{?\s*R\s*\}?"
_DEFINED = re.compile(  # \{x \in \mathbb{R} : x<3\}
    rf"(?:\\\{{\s*)?([a-zA-Z])\s*(?:\\in\s*{_ALL_REALS})?\s*"
    r"(?::|\||\\(?:mid|colon|vert)(?![a-zA-Z])|\\text\s*\{\s*(?:such that|s\.t\.)\s*\})(.*?)(?:\\\})?",
    re.DOTALL,
)
_PART_OF_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:[\^_]\s*\{?\s*(\+|-|(?:[<>]|\\[lg]e)\s*0)\s*\}?)?")


def real_set(latex: str) -> tuple[set[Any], Any] | None:
    """Return (variables of the conditions, SymPy set) for LaTeX that describes a set of real numbers, or else None.

    The set is empty only if the LaTeX says so. math-verify reads few such sets, and takes conditions for lists.
    """
    latex = latex.strip()
    either, both, less = parts(latex, _EITHER), parts(latex, _BOTH), parts(latex, _MINUS)
    if len(either) > 1:  # also x<1, 2<x<3, or x>4
        return _joined([member for some in either for member in parts(some, ",")], sympy.Union)
    if len(both) > 1:
        name, unequal, _ = both[0].partition(r"\neq")  # x \neq 0, 1
        prefix = name + unequal if unequal else ""
        return _joined([prefix * bool(NUMBER.fullmatch(some.strip())) + some for some in both], sympy.Intersection)
    if reals := _PART_OF_REALS.fullmatch(latex):
        sign = reals[1] or ""
        low, high = (-sympy.oo, 0) if re.match(r"-|<|\\le", sign) else (0, sympy.oo)
        return set(), sympy.Interval(low, high, "e" not in sign, "e" not in sign) if sign else sympy.S.Reals
    if len(less) == 2:
        whole, points = real_set(less[0]), [part for part in parse_box(less[1]) if isinstance(part, sympy.FiniteSet)]
        return (whole[0], whole[1] - exact(points[0])) if whole and points else None
    if defined := _DEFINED.fullmatch(latex):
        inner = real_set(defined[2])
        return inner if inner and {str(variable) for variable in inner[0]} == {defined[1]} else None
    if member := re.fullmatch(r"[a-zA-Z]\s*\\in(?![a-zA-Z])(.*)", latex, re.DOTALL):
        return real_set(member[1])
    if r"\pm" in latex and r"\neq" in latex:  # x \neq \pm 1
        return _joined([latex.replace(r"\pm", sign) for sign in ("", "-")], sympy.Intersection)
    related = RELATION.search(latex)
    if not related and not re.search(r"^[(\[].*[)\]]$|\\emptyset", latex, re.DOTALL):
        return None
    expression = next((part for part in parse_box(latex) if not isinstance(part, str)), None)
    variables: set[Any] = getattr(expression, "free_symbols", set())
    if isinstance(expression, sympy.Set):
        unread = variables or (expression.is_empty and r"\emptyset" not in latex)
        return None if unread else (set(), exact(expression))
    if len(variables) != 1 or isinstance(expression, sympy.Eq) or not related:
        return None
    return variables, exact(expression).as_set()


def _joined(members: list[str], join: Any) -> tuple[set[Any], Any] | None:
    sets = [real_set(member) for member in members if member.strip()]
    variables = {variable for some in sets if some for variable in some[0]}
    if None in sets or len(variables) > 1:
        return None
    return variables, reduce(join, (some[1] for some in sets if some))


def exact(expression: Any) -> Any:
    """Return an expression with its decimals as fractions."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def is_equal(gold: str, answer: str) -> bool:
    gold_word, response_word = word(gold), word(answer)
    if gold_word is not None:  # or the letter of a choice with its text
        letters = (bare(answer).lower(), choice(bare(answer))[0].lower())
        return response_word == gold_word if response_word else len(gold_word) == 1 and gold_word in letters
    expected = read_gold(gold)

    def sides(latex: str) -> list[str]:  # all numbers of an equation must equal the gold answer, as in 5=6
        terms = latex.split("=") if "=" in latex and "=" not in expected.latex and r"\neq" not in latex else []
        numbers = [term for term in terms if term.strip() and not re.search(r"(?<![a-zA-Z\\])[a-zA-Z]", term)]
        return [term.strip() for term in numbers] or [latex]

    response = read(answer, keep_name="=" in expected.latex)
    if response is None or refused(expected, response):
        return False
    return any(all(same_value(expected.latex, side) for side in sides(latex)) for latex in values(expected, response))


def same_value(gold: str, response: str) -> bool:
    value, number = number_of(gold), number_of(response)
    if value is not None and number is not None:  # 0.333333 is 1/3
        return value == number or is_rounded(value, response) or is_rounded(number, gold)
    if re.sub(r"\s", "", gold) == re.sub(r"\s", "", response):
        return True
    expected_set, response_set = real_set(gold), real_set(response)
    if expected_set and response_set:
        (names, members), (response_names, response_members) = expected_set, response_set
        alike = not (names and response_names) or names == response_names  # not x<3 and y<3
        return alike and (members == response_members or bool(members.symmetric_difference(response_members).is_empty))
    if (expected_set or response_set) and RELATION.search(gold if expected_set else response):
        return False
    return bool(verify(parse_gold(gold), parse_box(response), allow_set_relation_comp=True, timeout_seconds=None))


def is_rounded(value: Fraction, decimal: str) -> bool:
    """Return True if a decimal of six or more digits is a value, rounded, that no decimal equals."""
    if not re.fullmatch(r"[-+]?\d*\.\d+", decimal) or 10**2000 % value.denominator == 0:
        return False
    number = Decimal(decimal).normalize()
    last = Fraction(10) ** int(number.as_tuple().exponent)
    return abs(value - Fraction(number)) <= min(last / 2, abs(value) * Fraction(2, 10**6))


def same_expression(gold: Any, response: Any, *_: Any) -> bool:
    """Return True if two expressions of SymPy have the same value. A decimal may be the other value, rounded."""
    matrices = [isinstance(part, sympy.MatrixBase) for part in (gold, response)]
    if any(matrices):
        same_shape = all(matrices) and gold.shape == response.shape
        return same_shape and all(map(same_expression, gold.doit().flat(), response.doit().flat()))
    difference = (exact(gold) - exact(response)).doit()
    if difference == 0 or difference.free_symbols:
        return bool(difference == 0)
    if all(part == 0 or part._prec == 1 for part in difference.evalf(15, maxn=400).as_real_imag()):
        return True  # SymPy finds no digit of the difference
    for value, decimal in ((gold.doit(), response.doit()), (response.doit(), gold.doit())):
        if isinstance(decimal, sympy.Float) and not value.has(sympy.Float) and value.is_real:
            # A small part of a third is added to what is no fraction, so that no decimal equals it.
            digits = Fraction(str(value if value.is_Rational else value.evalf(50)))
            return is_rounded(digits + (0 if value.is_Rational else Fraction(1, 3 * 10**60)), str(decimal))
    return False


grader.sympy_numeric_eq = same_expression  # math-verify's own rounds to six places, and takes 10^{-20} for 0


def handle(request: dict[str, Any]) -> bool:
    """Return the answer to one request. If math-verify raises an error, the answer is False."""
    try:
        gold = request["gold"]
        if request["op"] == "gold":
            return word(gold) is not None or bool(parse_gold(read_gold(gold).latex))
        kind, response = request["answer"]
        if kind == "box":
            return is_equal(gold, response)
        if kind == "line" and claimed(response) == response:
            line = response.partition("\n")[0].strip("*_ ")
            equal = is_equal(gold, _REASON.split(line)[0])
            if equal or not (line[0].isalpha() and is_prose(line)):
                return equal
        expected = parse_gold(read_gold(gold).latex)
        return bool(verify(expected, parse(claimed(response)), timeout_seconds=None))
    except Exception:  # RecursionError and MemoryError among them
        return False


def serve(connection: socket.socket) -> None:
    with suppress(ValueError, OSError):  # some systems have no such limit; the time limit still holds
        # A huge number fails in this process, and does not exhaust the machine.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # Without a buffer, a child that is killed has not read requests that the next child must answer.
    for line in iter(connection.makefile("rb", buffering=0).readline, b""):
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["limit"])
        answer = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(json.dumps({"ok": answer}).encode() + b"\n")
    os._exit(1)


def prepare() -> None:
    """Compile the regular expressions of the libraries, which would cost a child more than its time."""
    logging.disable(logging.CRITICAL)
    same_value(r"(-\infty,2)\cup(2,\infty)", r"x \neq 2")
    same_value(r"\sqrt{2}", r"\sin 45")


def main() -> None:
    answer_requests(prepare, serve)
