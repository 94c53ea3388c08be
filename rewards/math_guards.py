r"""Where math-verify is wrong about an answer: what is taken off before it is asked, and what it is not asked at all.

`read` takes an answer that is spelt out (`math_spelling.py`) and sets apart what is not math-verify's subject: the
unit, the base. `refused` names what it would accept although the two say different things. Each guard has an example
beside it; docs/rewards.md says them in words, and the tables in tests/rewards hold hundreds of examples each way. Knows
nothing of processes or rewards, and does not import math-verify: `math_worker.py` compares the values.
"""

import re
from typing import NamedTuple

from rewards.math_spelling import DENIED, IMAGINARY, INDEX, bare, choice, latex_of, number_of, spelt

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
    "point|factorial|zero|negative|sin|cos|tan|log|ln|exp|sqrt|pi|mod|modulo|base|"
    "dozens?|hundreds?|thousands?|millions?|billions?|trillions?"
)
_COMPARING = re.compile(  # 42 percent less
    "less|fewer|more|greater|(?:low|high|small|larg|bigg|cheap|dear)er|below|above|under|over|off|"
    "(?:in|de)crease|discount|reduction|decline|drop|rise|gain|loss"
)
_CURRENCY = re.compile(r"([-+]?)\s*(?:\\text\s*\{\s*)?(US\s*\\?\$|\\?\$|[€£¥₹]|USD|EUR|GBP)\s*\}?\s*(?=[-+\d.])")
_NUMBER_PART = re.compile(r"""(?:[^"'A-Za-z\\°%¢]|\\[^A-Za-z]|\\[A-Za-z]+)*""")
_UNIT_POWER = r"\^\s*(?:-?[1-9]|\{\s*-?[1-9]\s*\})"
_UNIT_TEXT = rf'"(?:[^"\d^]|{_UNIT_POWER})*"|{_UNIT_POWER}'
_UNIT_PART = re.compile(rf"(?:{_UNIT_TEXT}|[A-Za-z°%¢/'\s.-])+")
_UNIT_START = re.compile(r"""["'°%¢]|(?:cm|mm|km|kg|mph|ft|in|lbs?|hr|min|sq|cu)\b|(?<=\s)[A-Za-z]{3,}""")
_UNIT_TOKEN = re.compile(r"[a-z]+|'+|[°%¢/]|\^-?[1-9]")
_UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{((?:{_UNIT_TEXT}|\s)+)\}}\s*\{{((?:{_UNIT_TEXT}|\s)+)\}}")
_IN_PARENTHESES = re.compile(rf"\(((?:{_UNIT_TEXT}|[A-Za-z°%¢/\s.-])+)\)$")  # 42 (people)

_BASED = re.compile(r"\(?([0-9A-Fa-f]+)\)?_(?:\{\s*(\d+)\s*\}|(\d+))")
_RADIANS = re.compile(r"(?<!\}\{)(?<!/)\\pi")  # \frac{\pi}{6}, but not \frac{180}{\pi}
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![a-zA-Z])")
_RANGE = re.compile(r"^[(\[].*[)\]]$|\\(?:cup|infty|in)(?![a-zA-Z])", re.DOTALL)
_SEPARATOR = re.compile(r"\\[{}]|[()\[\]{},;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")


class Reading(NamedTuple):
    """An answer as math-verify should see it, and what was taken off it ("" where there was none)."""

    latex: str
    unit: str = ""  # in its one name, with its power: "inch^2", "%", "mile per hour"
    base: str = ""


def read(answer: str, *, keep_name: bool = True) -> Reading | None:
    """The answer, spelt out; None where words beside a number make it another one. Without `keep_name` x=5 is 5."""
    latex = spelt(answer)
    name, equals, value = latex.partition("=")
    name = re.sub(INDEX, "", name)
    if equals and not keep_name and re.search(r"[a-zA-Z]", name) and not re.search(r"\d|[<>]|\\[lgn]eq?\b", name):
        latex = value.strip()
    if r"\approx" in latex and re.search(r"\d", latex.partition(r"\approx")[0]):  # 14/3 \approx 4.67
        latex = latex.partition(r"\approx")[0].strip()
    name, equals, value = latex.rpartition("=")
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
    number = _NUMBER_PART.match(quoted)
    assert number is not None  # it may be empty
    value, words = number[0].strip(), quoted[number.end() :]
    if (
        not re.search(r"\d|\\pi", value)
        or not _UNIT_START.match(quoted, number.end())
        or not _UNIT_PART.fullmatch(words)
    ):
        return Reading(latex, unit)
    tokens = _UNIT_TOKEN.findall(re.sub(r"[{}]", "", words.lower()))
    while tokens and (scale := _SCALE.get(tokens[0].removesuffix("s"))):  # 18 million
        scaled = number_of(value)
        if scaled is None:
            return None
        value, tokens = latex_of(scaled * scale), tokens[1:]
    if any(map(_CHANGING.fullmatch, tokens)) or (len(tokens) == 1 and tokens[0] in ("squared", "cubed")):
        return None
    if tokens[:1] == ["%"] and any(map(_COMPARING.fullmatch, tokens)):
        return None
    return Reading(value, _one_name(tokens) or unit)


def _one_name(tokens: list[str]) -> str:
    """One name for the same unit: sq in, square inches and inches^2 are inch^2."""
    power, names = 1, list[str]()
    for place, token in enumerate(tokens):
        if place and token in _ASIDE:
            break
        if token in _POWER or token[0] == "^":
            power = _POWER.get(token) or int(token[1:])
            if power < 0:  # m s^{-1}
                power = -power
                names.insert(-1, "per")
        else:
            plain = token[:-1] if len(token) > 2 and token.endswith("s") and token not in _UNIT else token
            names.append(_UNIT.get(token) or _UNIT.get(plain, plain))
    return " ".join(names) + (f"^{power}" if power > 1 and names else "")


def word(answer: str) -> str | None:
    r"""The word or the letter of a choice that the answer is, in lower case; None for mathematics, such as xy.

    math-verify reads a word as a product of its letters, equal to every anagram. Here it is a word from four letters
    on, in \text, in capitals, or with a vowel that is seldom a variable.
    """
    plain = bare(answer)
    text = re.fullmatch(r"\\text\s*\{([^{}\\]*)\}", plain)
    plain = re.sub(r"^(?:an?|the)\s+", "", (text[1] if text else plain).strip(" .\"'"), flags=re.IGNORECASE)
    if re.fullmatch(r"\([A-H]\)|[A-H]", plain):
        return plain.strip("()").lower()
    if not re.fullmatch(r"[^\W\d_]+", plain):
        return None
    if plain in ("pi", "infinity") and not text:
        return None
    wordy = len(plain) >= 4 or (len(plain) > 1 and (plain.isupper() or re.search("[eiouEIOU]", plain)))
    return plain.lower() if wordy or text else None


def same_word(gold: str, answer: str) -> bool:
    """Whether the answer is that word. A choice needs no parentheses, and may be followed by what it says."""
    said = word(answer)
    if said is not None:
        return said == gold
    return len(gold) == 1 and gold in (bare(answer).lower(), choice(bare(answer))[0].lower())


def refused(gold: Reading, said: Reading) -> bool:
    r"""Whether the two differ in what math-verify does not look at."""
    units = {gold.unit, said.unit}
    value = said.latex if "=" in gold.latex else said.latex.rpartition("=")[2]  # f'(2) = 15
    return bool(
        # inches^2 and inches^3, but not cm^2 and square units
        (len(units) == 2 and "" not in units and "unit" not in {unit.partition("^")[0] for unit in units})
        or (said.base and said.base != (gold.base or "10"))  # 4343_7 and 4343_6
        or (gold.base and gold.latex.lstrip("0") != said.latex.lstrip("0"))
        or (r"\neq" in gold.latex) != (r"\neq" in said.latex)  # \neq 18
        or (_INEQUALITY.search(said.latex) and not _INEQUALITY.search(gold.latex) and not _RANGE.search(gold.latex))
        or (DENIED.search(said.latex.lower()) and not DENIED.search(gold.latex.lower()))  # at most 18
        or gold.latex.count("'") != value.count("'")  # y' and y
        or (_RADIANS.search(gold.latex) and _in_degrees(said) and not _in_degrees(gold))  # \frac{\pi}{6}^\circ
        or _shapes_differ(gold.latex, said.latex)
    )


def _in_degrees(reading: Reading) -> bool:
    return reading.unit in ("degree", "'", "''") or "°" in reading.latex


def _shapes_differ(gold: str, said: str) -> bool:
    if _INEQUALITY.search(said) or any(r"\pm" in text or r"\in " in text or r"\cup" in text for text in (gold, said)):
        return False
    (brackets, count, pairs), (others, said_count, said_pairs) = _shape(gold), _shape(said)
    if pairs and said_pairs and pairs != said_pairs:
        return True  # (1,2) and [1,2]
    if brackets == others == "":
        return count != said_count  # 1,2 and 1,2,2
    if count == 1 or said_count == 1:
        return False
    return others != "()" if brackets == "()" else brackets == r"{}" and others not in ("{}", "")  # (1,2) and 1,2


def _shape(latex: str) -> tuple[str, int, list[str]]:
    r"""The brackets around all of it, () or (] or {} (for \{ \}), "" for none; how many elements it lists; and each
    pair of brackets in it, but for {}, that holds a list.
    """
    opened, commas, pairs = list[re.Match[str]](), [0], list[str]()
    latex = latex.rpartition("=")[2].strip()
    for match in _SEPARATOR.finditer(latex):
        mark = match[0].removeprefix("\\")
        if mark in "([{":
            opened.append(match)
            commas.append(0)
        elif mark in ")]}" and opened:
            start, inside = opened.pop(), commas.pop()
            brackets = "" if start[0] == "{" else start[0].removeprefix("\\") + mark
            if inside and brackets not in ("", "{}"):
                pairs.append(brackets)
            if brackets and start.start() == 0 and match.end() == len(latex):
                return brackets, inside + 1, sorted(pairs)
        elif mark in ",;" or not re.search(r"[,;]\s*$", latex[: match.start()]):  # 3, 5, and 7
            commas[-1] += 1
    return "", commas[0] + 1, sorted(pairs)


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
    """Prose without the numbers that it denies, asks about or takes back: "The answer is not 18." names none."""
    text = _DENIED_MENTION.sub(" ", re.sub(*IMAGINARY, text))
    taken_back = list(_TAKEN_BACK.finditer(text))
    return "The answer is " + text[taken_back[-1].end() :] if taken_back else text
