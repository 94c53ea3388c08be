"""Guards against errors of math-verify: removes what math-verify misreads, rejects what math-verify wrongly accepts.

`read` normalises an answer (`math_spelling.py`) and separates the unit and the base of the number, which math-verify
does not handle. `refused` finds answers that math-verify would accept although they differ from the gold answer. A
comment beside each guard shows an example. docs/rewards.md describes the guards, and the tables in tests/rewards hold
hundreds of accepted and rejected examples. `math_worker.py` calls math-verify.
"""

import re
from typing import NamedTuple

from rewards.math_spelling import DENIED, IMAGINARY, INDEX, bare, choice, latex_of, number_of, spelt

# Units. Letters after a number are a unit, not a variable, if they are in \text, name a known unit, or are a word after
# a space: 18 eggs, but not 18x.
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
_ASIDE = {"of", "each", "in", "for", "from", "total", "left"}  # 3 bolts of fabric: the unit ends here
# Words after a number that change its value, or deny that it is the answer: 18 squared, 18 thirds, 18 is wrong.
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
    """An answer for math-verify, and the unit and the base that were removed from it ("" if it had none)."""

    latex: str
    unit: str = ""  # canonical name with power: "inch^2", "%", "mile per hour"
    base: str = ""


def read(answer: str, *, keep_name: bool = True) -> Reading | None:
    """Normalise an answer, and separate unit and base. None means that a word after the number changes its value.

    keep_name : False removes the name of a variable in front of the value, so that x=5 becomes 5
    """
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
    assert number is not None  # the pattern always matches, if only the empty string
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
    """Return the canonical name of a unit. For example, sq in, square inches and inches^2 all become inch^2."""
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
    r"""Return the answer in lower case if it is a word or the letter of a choice. None means that it is mathematics.

    math-verify reads a word as a product of its letters, so that anagrams are equal. Letters are a word if there are at
    least four, or if they are in \text, in capitals, or contain a vowel that is rarely the name of a variable.
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
    """Return True if the answer is the word `gold`.

    If `gold` is the letter of a choice, the answer may omit the parentheses, and the text of the choice may follow.
    """
    response = word(answer)
    if response is not None:
        return response == gold
    return len(gold) == 1 and gold in (bare(answer).lower(), choice(bare(answer))[0].lower())


def refused(gold: Reading, response: Reading) -> bool:
    """Return True if the two answers differ in something that math-verify does not check."""
    units = {gold.unit, response.unit}
    value = response.latex if "=" in gold.latex else response.latex.rpartition("=")[2]  # f'(2) = 15
    return bool(
        # refuses inches^2 for inches^3, but not cm^2 for square units
        (len(units) == 2 and "" not in units and "unit" not in {unit.partition("^")[0] for unit in units})
        or (response.base and response.base != (gold.base or "10"))  # 4343_7 and 4343_6
        or (gold.base and gold.latex.lstrip("0") != response.latex.lstrip("0"))
        or (r"\neq" in gold.latex) != (r"\neq" in response.latex)  # \neq 18
        or (_INEQUALITY.search(response.latex) and not _INEQUALITY.search(gold.latex) and not _RANGE.search(gold.latex))
        or (DENIED.search(response.latex.lower()) and not DENIED.search(gold.latex.lower()))  # at most 18
        or gold.latex.count("'") != value.count("'")  # y' and y
        or (_RADIANS.search(gold.latex) and _in_degrees(response) and not _in_degrees(gold))  # \frac{\pi}{6}^\circ
        or _shapes_differ(gold.latex, response.latex)
    )


def _in_degrees(reading: Reading) -> bool:
    return reading.unit in ("degree", "'", "''") or "°" in reading.latex


def _shapes_differ(gold: str, response: str) -> bool:
    if _INEQUALITY.search(response) or any(
        r"\pm" in text or r"\in " in text or r"\cup" in text for text in (gold, response)
    ):
        return False
    (brackets, count, pairs), (response_brackets, response_count, response_pairs) = _shape(gold), _shape(response)
    if pairs and response_pairs and pairs != response_pairs:
        return True  # (1,2) and [1,2]
    if brackets == response_brackets == "":
        return count != response_count  # 1,2 and 1,2,2
    if count == 1 or response_count == 1:
        return False
    return (
        response_brackets != "()" if brackets == "()" else brackets == r"{}" and response_brackets not in ("{}", "")
    )  # (1,2) and 1,2


def _shape(latex: str) -> tuple[str, int, list[str]]:
    r"""Return the shape of an answer: (outer brackets, number of list elements, pairs of brackets that hold a list).

    The outer brackets surround the whole answer: () or (] and so on, {} for \{ \}, or "" if there are none. The pairs
    are sorted, without {}.
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


def values(gold: Reading, response: Reading) -> list[str]:
    r"""Return the possible values of the answer as LaTeX. One of them must equal the gold answer.

    A percent sign matters only if exactly one of the two answers has it. If only the answer has the sign and the gold
    answer is at least 1, % counts as a unit: 18\% equals 18, but 1800\% does not. For any other gold answer, % means
    hundredths: 25\% equals 1/4. If only the gold answer has the sign, 12.5 and 0.125 both equal 12.5\%.
    """
    if "%" not in (gold.unit, response.unit) or gold.unit == response.unit:
        return [response.latex]
    if gold.unit == "%":  # 12.5\% and 0.125
        return [response.latex, rf"100 \cdot ({response.latex})"]
    gold_value = number_of(gold.latex)
    return [response.latex if gold_value is not None and abs(gold_value) >= 1 else rf"\frac{{{response.latex}}}{{100}}"]


def sides(response: str, gold: str) -> list[str]:
    """Return the parts of the answer that must all equal the gold answer.

    The parts of an equation are all its numbers, so that 5=6 does not equal 6. Any other answer is one part.
    """
    if "=" in gold or "=" not in response or r"\neq" in response:
        return [response]
    parts = [part.strip() for part in response.split("=")]
    numbers = [part for part in parts if part and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", part))]
    return numbers or [response]


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
