"""A structured-output request beyond a limit is refused before a backend compiles it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.vllm.compat.server import LIMITS, _quantified, _sizes, over_structure

MANY, LONG = LIMITS["items"] + 1, LIMITS["repetitions"] + 1
MATRIX: Any = {"type": "array", "items": {"type": "array", "minItems": 200}, "maxItems": 200}
REPEAT = {"type": "repeat", "min": 0, "max": MANY, "content": {"type": "regex", "pattern": "a"}}
LETTER = {"type": "regex", "pattern": f"a{{{LONG}}}"}
OVER: list[tuple[str, Any, str]] = [
    ("json", {"type": "array", "minItems": 10**9}, "items"),
    ("json", {"type": "array", "minItems": 10**400}, "items"),
    ("json", {"type": "array", "maxItems": 1e300}, "items"),
    ("json", {"$defs": {"a": {"maxProperties": MANY}}, "$ref": "#/$defs/a"}, "items"),
    ("json", {"properties": {"default": {"enum": {"const": {"minItems": MANY}}}}}, "items"),
    ("json", {"anyOf": [{"minContains": MANY}, {"type": "integer"}]}, "items"),
    ("json", MATRIX, "items"),
    ("json", {"prefixItems": [{"type": "array", "maxItems": MANY // 2}] * 3}, "items"),
    ("json", {"properties": {"a": {"type": "string", "maxLength": LONG}}}, "repetitions"),
    ("json", {"type": "string", "pattern": f"^a{{{LONG}}}$"}, "repetitions"),
    ("json", {"patternProperties": {f"a{{2,{LONG}}}": {"type": "string"}}}, "repetitions"),
    ("json", {"enum": ["a" * 40_000]}, "characters"),
    ("json", {"description": "a" * 40_000}, "characters"),
    ("json", {"anyOf": [{}] * 17_000}, "values"),
    ("regex", f"a{{{LONG}}}", "repetitions"),
    ("regex", f"a{{1,{LONG}}}", "repetitions"),
    ("regex", f"a{{,{'9' * 5_000}}}", "repetitions"),
    ("regex", "((a{100}){100}b|c){101}", "repetitions"),
    ("regex", "a" * 40_000, "characters"),
    ("grammar", f'root ::= ("a"){{{LONG}}}', "repetitions"),
    ("grammar", f'start: ["a"~1..{LONG}]', "repetitions"),
    ("choice", [str(i) for i in range(10_000)], "characters"),
    ("whitespace_pattern", f"[ ]{{{LONG}}}", "repetitions"),
    ("structural_tag", {"type": "structural_tag", "format": REPEAT}, "items"),
    ("structural_tag", {"type": "structural_tag", "format": {"type": "sequence", "elements": [LETTER]}}, "repetitions"),
    ("structural_tag", {"structures": [{"begin": "a", "schema": {"minItems": MANY}, "end": "b"}]}, "items"),
]
WITHIN: list[tuple[str, Any]] = [
    ("json", {"type": "integer", "minimum": 10**30, "maximum": 10**31, "multipleOf": 10**9}),
    ("json", {"type": "array", "items": {"type": "string", "maxLength": 65_535}, "maxItems": 10_000}),
    ("json", {"type": "object", "properties": {"minItems": {"type": "integer"}, "max": {"type": "string"}}}),
    ("json", {"type": "array", "minItems": MANY - 1}),
    ("json", {"properties": {"a": {"maxLength": 10**6}, "b": {"maxLength": 10**6}}}),
    ("regex", r"(a{1,1000}\n){900}(b{1000}c){999}"),
    ("regex", r"(a{300}b){300}[{}]\{99999999\}"),
    ("grammar", 'root ::= "a"{1,1000} "b"*'),
    ("choice", ["yes", "no"]),
]


def structure(field: str, value: Any) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    rest = {"json": {}} if field == "whitespace_pattern" else {}
    return StructuredOutputsParams(**{field: value, **rest})


@pytest.mark.parametrize(("field", "value", "limit"), OVER)
def test_a_structure_beyond_a_limit_is_refused_with_its_field(field: str, value: Any, limit: str) -> None:
    """A schema may be given as a value or as a text. Control: the structures of WITHIN."""
    message = f"{field}: the server accepts at most {LIMITS[limit]} {limit} here; send less"
    text = json.dumps(value)
    for form in {"json": [value, text], "structural_tag": [text]}.get(field, [value]):
        assert over_structure(structure(field, form)) == message


@pytest.mark.parametrize(("field", "value"), WITHIN)
def test_a_structure_within_the_limits_is_left_to_vllm(field: str, value: Any) -> None:
    assert over_structure(structure(field, value)) is None


# ---- against plain references ---------------------------------------------------------------------------------------

ATOMS = st.sampled_from(["a", "[(]", r"\)", ".", "[^]]"]).map(lambda text: (text, 1))


def alternatives(parts: list[tuple[str, int]]) -> tuple[str, int]:
    return f"({'|'.join(text for text, _ in parts)})", max(size for _, size in parts)


def repeated(part: tuple[tuple[str, int], int, bool]) -> tuple[str, int]:
    (text, size), times, at_most = part
    return f"{text}{{{'0,' if at_most else ''}{times}}}", size * times


PATTERNS = st.recursive(
    ATOMS, lambda p: st.lists(p, min_size=1, max_size=3).map(alternatives)
    | st.tuples(st.lists(p, min_size=1, max_size=2).map(alternatives), st.integers(1, 9), st.booleans()).map(repeated),
)  # fmt: skip
TEXTS = st.text('a[]{}"\\')
VALUES = st.recursive(st.none() | TEXTS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3))


@given(PATTERNS)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_nested_quantifiers_multiply(pattern: tuple[str, int]) -> None:
    """Control: the count does not multiply neighbours."""
    text, size = pattern
    assert _quantified(text) >= size
    assert _quantified(f"{text}{text}b") == _quantified(f"{text}b")


@given(VALUES)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_the_sizes_of_json_equal_those_of_a_recursive_count(value: Any) -> None:
    def count(value: Any) -> tuple[int, int]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if inner is None:
            return 0, 0
        parts = [count(item) for item in inner]
        levels = 1 + max((part[0] for part in parts), default=0)
        return levels, len(parts) + sum(part[1] for part in parts)

    assert tuple(_sizes(value, "messages").values()) == count(value)
