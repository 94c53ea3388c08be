r"""Where math-verify is wrong about an answer: what is mended before it is asked, and what it is not asked at all.

`read` spells an answer so that math-verify understands it, and takes off what is not its subject: the unit, the base.
`refused` names what it would accept although the two say different things. Each guard has an example beside it;
docs/rewards.md says them in words, and the tables in tests/rewards hold 200 examples each way. Knows nothing of
processes or rewards, and does not import math-verify: `math_worker.py` compares the values.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

# Spelling, of gold and answer alike, in this order. First characters, then patterns.
_VULGAR = {"½": "{1}{2}", "⅓": "{1}{3}", "⅔": "{2}{3}", "¼": "{1}{4}", "¾": "{3}{4}", "⅕": "{1}{5}", "⅛": "{1}{8}"}
_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq "}
    | {"≈": r"\approx ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm "}
    | {"²": "^2", "³": "^3", "\u00a0": " ", "\u2009": " ", "\u202f": " "}
    | {sign: rf"\frac{parts}" for sign, parts in _VULGAR.items()}
)
_SPELLING: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
    (r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|bf|it)|mbox|operatorname)(?![a-zA-Z])", r"\\text"),
    # \textbf{(E)}\ 27: the letter of a choice, and what it says
    (r"^\\text\s*\{\s*\([A-H]\)\s*\}(?:\\[ ,;:]|\\q?quad|[\s~])*(?=[\d\\.-])", ""),
    # 1\,234 and 10,\!080
    (r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:! ]|~|\{,\}|,\\!|\s)\s*\d{3})+(?![\d/])", lambda m: re.sub(r"\D", "", m[0])),
    (r"^(?!\(|\[|\\\{)[^\d,.=]*\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", "")),  # $1,234
    (r"(?<!\\)\\[,;:!]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\not\s*=|\\ne(?![a-zA-Z])", r"\\neq "),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\degree(?![a-zA-Z])|\^\s*(?:\\circ|\{\s*\\circ\s*\})", "°"),
    (r"\\%|\\text\s*\{\s*percent\s*\}|\bpercent\b", "%"),
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
]
_PATTERNS = [(re.compile(pattern), replacement) for pattern, replacement in _SPELLING]

# Units. A unit is told from a variable by \text, by being known, or by being a word after a space: 18 eggs, not 18x.
_SAME_UNIT = {
    "inch": "in inches", "foot": "ft feet", "yard": "yd", "mile": "mi", "centimeter": "cm centimetre",
    "meter": "m metre", "millimeter": "mm millimetre", "kilometer": "km kilometre", "kilogram": "kg", "gram": "g gm",
    "pound": "lb lbs", "liter": "l litre", "second": "s sec", "minute": "min", "hour": "h hr", "degree": "° deg",
    "cent": "¢", "dollar": "$ usd us$", "euro": "€ eur", "pound sterling": "£ gbp", "yen": "¥", "rupee": "₹",
    "mile per hour": "mph", "per": "/",
}  # fmt: skip
_UNIT = {short: unit for unit, shorts in _SAME_UNIT.items() for short in shorts.split()}
_POWER = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_SCALE = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ASIDE = {"of", "each", "in", "for", "from", "total", "left"}  # 3 bolts of fabric: what follows is no unit
# Words after a number that say another number, or that it is not the answer: 18 squared, 18 thirds, 18 is wrong.
_CHANGING = re.compile(
    "half|halves|thirds?|fourths?|fifths?|tenths?|hundredths?|times|plus|minus|over|and|or|to|not|is|are|was|than|wrong|"
    "point|factorial|sin|cos|tan|log|ln|exp|sqrt|pi"
)
_CURRENCY = re.compile(r"([-+]?)\s*(?:\\text\s*\{\s*)?(US\s*\\?\$|\\?\$|[€£¥₹]|USD|EUR|GBP)\s*\}?\s*(?=[-+\d.])")
_NUMBER_PART = re.compile(r'(?:[^"A-Za-z\\°%¢]|\\[^A-Za-z]|\\[A-Za-z]+)*')
_UNIT_PART = re.compile(r'(?:"[^"]*"|[A-Za-z°%¢/\s.-]|\^\s*\{?\s*[23]\s*\}?)+')
_UNIT_START = re.compile(r'["°%¢]|(?:cm|mm|km|kg|mph|ft|in|lbs?|hr|min)\b|(?<=\s)[A-Za-z]{3,}')
_UNIT_TOKEN = re.compile(r"[a-z]+|[°%¢/]|\^[23]")

_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(?:\{\s*(\d+)\s*\}|(\d+))")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_DENIED = re.compile(r"\b(?:not|no|never|neither|less|more|than|at (?:most|least)|between|minus|to)\b")  # not 18
_NAME = re.compile(r"([,;]|\b(?:or|and)\b\s*\}?)\s*[a-zA-Z]\s*=")  # x=1, x=-2
_INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|leq|geq|lt|gt|leqslant|geqslant)(?![a-zA-Z])")
_RANGE = re.compile(r"^[(\[].*[)\]]$|\\(?:cup|infty|in)(?![a-zA-Z])", re.DOTALL)
_RAY = re.compile(r"([a-zA-Z])\s*(<|>|\\[lg]eq?(?![a-zA-Z]))([^<>\\=]+|[^<>\\=]*\\(?:frac|sqrt|pi)[^<>=]*)")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b")
_SEPARATOR = re.compile(r"\\[{}]|[()\[\]{},;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")


class Reading(NamedTuple):
    """An answer as math-verify should see it, and what was taken off it ("" where there was none)."""

    latex: str
    unit: str = ""  # in its one name, with its power: "inch^2", "%", "mile per hour"
    base: str = ""


def read(answer: str, *, keep_name: bool = True) -> Reading | None:
    """The answer, spelt out; None where words beside a number make it another one. Without `keep_name` x=5 is 5."""
    latex = _bare(answer).translate(_CHARACTERS)
    for pattern, replacement in _PATTERNS:
        latex = pattern.sub(replacement, latex).strip()
    name, equals, value = latex.partition("=")
    if equals and not keep_name and re.search(r"[a-zA-Z]", name) and not re.search(r"\d|[<>]|\\[lgn]eq?\b", name):
        latex = _NAME.sub(r"\1", value.strip())
    if r"\approx" in latex and re.search(r"\d", latex.partition(r"\approx")[0]):  # 14/3 \approx 4.67
        latex = latex.partition(r"\approx")[0].strip()
    latex = _union(latex)
    name, equals, value = latex.rpartition("=")
    reading = _quantity(value.strip())
    return reading and reading._replace(latex=name + equals + reading.latex)


def _union(latex: str) -> str:
    r"""x<2 or x>3 as (-\infty,2) \cup (3,\infty), which math-verify takes for a list; anything else as it is."""
    parts = [_RAY.fullmatch(part.strip()) for part in _OR.split(latex)]
    if len(parts) < 2 or not all(parts) or len({part[1] for part in parts if part}) != 1:
        return latex
    rays = []
    for part in filter(None, parts):
        closed, end = part[2] not in "<>", part[3].strip()
        below = part[2] == "<" or part[2].startswith("\\l")
        rays.append(rf"(-\infty,{end}{')]'[closed]}" if below else rf"{'(['[closed]}{end},\infty)")
    return r" \cup ".join(rays)


def _bare(answer: str) -> str:
    """Without the full stop that ends a sentence, and without the dollars around a formula."""
    answer = re.sub(r"(?<!\\right)(?<!\.)\.\s*$", "", answer.strip())
    return re.sub(r"^(?:\$([^$]*)\$|\\\((.*)\\\))$", lambda m: m[1] or m[2] or "", answer, flags=re.DOTALL).strip()


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
    number = _NUMBER_PART.match(quoted)
    assert number is not None  # it may be empty
    value, words = number[0].strip(), quoted[number.end() :]
    if (
        not re.search(r"\d|\\pi", value)
        or not _UNIT_START.match(quoted, number.end())
        or not _UNIT_PART.fullmatch(words)
    ):
        return Reading(latex, unit)
    tokens = _UNIT_TOKEN.findall(words.lower().replace("{", "").replace("}", ""))
    while tokens and tokens[0] in _SCALE:  # 18 million
        scaled = number_of(value)
        if scaled is None:
            return None
        value, tokens = latex_of(scaled * _SCALE[tokens[0]]), tokens[1:]
    if any(map(_CHANGING.fullmatch, tokens)) or (len(tokens) == 1 and tokens[0] in ("squared", "cubed")):
        return None
    return Reading(value, _one_name(tokens) or unit)


def _one_name(tokens: list[str]) -> str:
    """One name for the same unit: sq in, square inches and inches^2 are inch^2."""
    power, names = 1, []
    for place, token in enumerate(tokens):
        if place and token in _ASIDE:
            break
        if token in _POWER or token[0] == "^":
            power = _POWER.get(token) or int(token[1:])
        else:
            plain = token[:-1] if len(token) > 2 and token.endswith("s") and token not in _UNIT else token
            names.append(_UNIT.get(token) or _UNIT.get(plain, plain))
    return " ".join(names) + (f"^{power}" if power > 1 and names else "")


def word(answer: str) -> str | None:
    r"""The word or the letter of a choice that the answer is, in lower case; None for mathematics, such as xy.

    math-verify reads a word as a product of its letters, equal to every anagram. Here it is a word from four letters
    on, in \text, in capitals, or with a vowel that is seldom a variable.
    """
    plain = _bare(answer)
    text = re.fullmatch(r"\\(?:text(?:bf|it|rm)?|mbox|math(?:rm|bf))\s*\{([^{}\\]*)\}", plain)
    plain = re.sub(r"^(?:an?|the)\s+", "", (text[1] if text else plain).strip(" .\"'"), flags=re.IGNORECASE)
    choice = re.fullmatch(r"\(([A-H])\)", plain)
    if choice:
        return choice[1].lower()
    if not re.fullmatch(r"[^\W\d_]+", plain):
        return None
    if plain in ("pi", "infinity") and not text:
        return None
    wordy = len(plain) >= 4 or (len(plain) > 1 and (plain.isupper() or re.search("[eiouEIOU]", plain)))
    return plain.lower() if wordy or text else None


def same_word(gold: str, answer: str) -> bool:
    """Whether the answer is that word. A choice needs no parentheses: C is (C)."""
    said = word(answer)
    return said == gold if said is not None else len(gold) == 1 and _bare(answer).lower() == gold


def refused(gold: Reading, said: Reading) -> bool:
    r"""Whether the two differ in what math-verify does not look at."""
    any_unit = "unit" in (gold.unit.partition("^")[0], said.unit.partition("^")[0])
    if gold.unit and said.unit and gold.unit != said.unit and not any_unit:
        return True  # inches^2 and inches^3, but not cm^2 and square units
    if said.base and said.base != (gold.base or "10"):
        return True  # 4343_7 and 4343_6
    if gold.base and gold.latex.lstrip("0") != said.latex.lstrip("0"):
        return True
    if (r"\neq" in gold.latex) != (r"\neq" in said.latex):  # \neq 18
        return True
    if _INEQUALITY.search(said.latex) and not _INEQUALITY.search(gold.latex) and not _RANGE.search(gold.latex):
        return True  # \le 18
    if _DENIED.search(said.latex.lower()) and not _DENIED.search(gold.latex.lower()):
        return True  # at most 18
    return _shapes_differ(gold.latex, said.latex)


def _shapes_differ(gold: str, said: str) -> bool:
    if _INEQUALITY.search(said) or any(r"\pm" in text or r"\in " in text or r"\cup" in text for text in (gold, said)):
        return False
    (bracket, count), (other, said_count) = _shape(gold), _shape(said)
    if bracket == other == "":
        return count != said_count  # 1,2 and 1,2,2
    if count == 1 or said_count == 1:
        return False
    if bracket == "(":
        return other in ("", "{") or (other == "[" and count > 2)  # (1,2) and 1,2; [6,31,-1] and a point
    return bracket == "{" and other in "([" and other != ""  # {1,2} and (1,2)


def _shape(latex: str) -> tuple[str, int]:
    r"""The bracket around all of it, ( [ or { (for \{), "" where there is none; and how many elements it lists."""
    depth, commas, outer = 0, {0: 0, 1: 0}, ""
    latex = latex.rpartition("=")[2].strip()
    for match in _SEPARATOR.finditer(latex):
        mark = match[0][-1] if match[0][0] == "\\" and len(match[0]) == 2 else match[0]
        if mark in "([{":
            outer = mark if match.start() == 0 and match[0] != "{" else outer
            depth += 1
        elif mark in ")]}":
            depth -= 1
            if depth == 0 and match.end() != len(latex):
                outer = ""
        elif depth in commas and (mark in ",;" or not re.search(r"[,;]\s*$", latex[: match.start()])):  # 3, 5, and 7
            commas[depth] += 1
    return outer, commas[1 if outer else 0] + 1


def number_of(latex: str) -> Fraction | None:
    """The exact value of a decimal or of a simple fraction; None for anything else."""
    if _NUMBER.fullmatch(latex):
        return Fraction(latex)
    fraction = _FRACTION.fullmatch(latex)
    if fraction is None or not int(fraction[3]):
        return None
    return Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] == "-" else 1)


def latex_of(value: Fraction) -> str:
    """The value as LaTeX: a whole number, or a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _shifted(digits: str, exponent: str) -> str:
    return format(Decimal(f"{digits}e{exponent}"), "f")


def _repeating(whole: str, head: str, period: str) -> str:
    nines = (10 ** len(period) - 1) * 10 ** len(head)
    value = abs(int(whole)) + Fraction(int(head + period) - int(head or "0"), nines)
    return latex_of(-value if whole.startswith("-") else value)


def values(gold: Reading, said: Reading) -> list[str]:
    r"""What the answer may mean, as LaTeX: more than one thing only where a percent sign is on one side alone.

    For a gold from 1 up % is a unit: 18\% is 18, and 1800\% is not. Below 1 it means hundredths: 25\% is 1/4.
    """
    if "%" not in (gold.unit, said.unit) or gold.unit == said.unit:
        return [said.latex]
    if gold.unit == "%":  # 12.5\% and 0.125
        return [said.latex, rf"100 \cdot ({said.latex})"]
    known = number_of(gold.latex)
    return [said.latex if known is not None and abs(known) >= 1 else rf"\frac{{{said.latex}}}{{100}}"]


def sides(said: str, gold: str) -> list[str]:
    """What must equal the gold: the answer and, in an equation, each side that is a number. 5=6 is not 6."""
    if "=" in gold or "=" not in said or r"\neq" in said:
        return [said]
    parts = [part.strip() for part in said.split("=")]
    numbers = [part for part in parts if part and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", part))]
    return numbers or [said]


_MENTION = r"(?:\$[^$\n]*\$|\\\([^\n]*?\\\)|[-$€£]?\d[\d.,/%]*)"
_DENIED_MENTION = re.compile(
    rf"(?:\bnot|\bnever|\bcannot|n['’]t)\s+(?:(?:be|equal(?: to)?|the answer)\s+){{0,2}}{_MENTION}"
)


def without_denied(text: str) -> str:
    """Prose without the numbers that it denies: "The answer is not 18." names none."""
    return _DENIED_MENTION.sub(" ", text)
