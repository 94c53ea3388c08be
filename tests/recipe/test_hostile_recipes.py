"""A recipe or override of any text gives a result within seconds: a recipe that can be saved, or an error of one short
line.

Random cases put hostile YAML in every place where YAML is read, and absurd values into every key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import in_one_line

from sparse_rl.errors import LONGEST, UserError
from sparse_rl.recipe import Recipe, load_recipe, make_recipe
from sparse_rl.recipe.yaml_text import MOST_CHARACTERS, parse_yaml

DATA = "data: {synthetic: {task: running_sum, size: 8}}, validation: {data: {path: x.jsonl, max_prompt_tokens: 8}}"
CACHE = "cache: {policy: gkv, budget: 512}, rollout: {kv_cache_gb: 1}"
TEXTS = {
    "grpo": f"{{kind: grpo, model: m, output_dir: o, {DATA}, {CACHE}, rewards: [math], lora: {{r: 4}}}}",
    "distill": f"{{kind: distill, model: m, output_dir: o, {DATA}, {CACHE}, teacher: t, top_k: 8, teacher_cache: c}}",
    "kvpop": f"{{kind: kvpop, model: m, output_dir: o, {DATA}, cache: {{policy: kvpop, budget: 512}}}}",
    "sft": "{kind: sft, model: m, output_dir: o, data: {synthetic: {task: running_sum, size: 8}}, lora: {r: 4}}",
    "eval": "{kind: eval, model: m, output_dir: o, tasks: {a: {path: x.jsonl}}, cache: {policy: cake, budget: 64}}",
    "bench": "{kind: bench, model: m, output_dir: o, contexts: {length: [64], compactions: [{ratio: [0.1]}]}}",
    "budgets": "{kind: budgets, model: m, output_dir: o, tasks: {a: {path: x.jsonl, columns: {context: c}}}}",
    "perplexity": "{kind: perplexity, model: m, output_dir: o, text: t, cache: {policy: gkv, budget: 64}}",
}


def keys_of(mapping: dict[str, Any], prefix: str = "") -> list[str]:
    """Return every dotted key, including the keys of blocks."""
    inner = [keys_of(value, f"{prefix}{key}.") for key, value in mapping.items() if isinstance(value, dict)]
    return [*(prefix + key for key in mapping), *(key for keys in inner for key in keys)]


KEYS = {kind: keys_of(make_recipe(parse_yaml(text, kind)).resolved()) for kind, text in TEXTS.items()}


def recipe_or_error(text: str, overrides: Sequence[str] = ()) -> Recipe | str:
    """Return the recipe, after saving and reading it again, or its one-line error. `in_one_line` checks the error's
    form and the time."""
    recipe = in_one_line(lambda: make_recipe(parse_yaml(text, "r.yaml"), overrides, "r.yaml"))
    if isinstance(recipe, str):
        return recipe
    make_recipe(parse_yaml(recipe.as_yaml(), "again"))
    recipe.as_yaml().encode()
    return recipe


WORDS = ("a", "no", "1e-6", "010", ".inf", ".nan", "1e999", "-0", "~", "<<", "=", "2024-01-01", "math", "1_000")
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**39, 1e-320, 1e-30, 1e30, 1e38, 1e308, -1e308)
TAGS = ("int", "float", "bool", "null", "str", "seq", "map", "set", "omap", "pairs", "binary", "timestamp", "merge")
ESCAPES = ("\\0", "\\ud800", "\\U00110000", "\\UFFFFFFFF", "\\x1b[2J", "\\N", "\\xqq", "\\e")
SIZES = st.sampled_from((1, 7, 300, 5_000, 20_000, MOST_CHARACTERS + 1))
LEVELS = st.sampled_from((1, 7, 30, 1000))


VALUES = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(NUMBERS).map(str),
    SIZES.map(lambda size: "7" * size),
    SIZES.map(lambda size: "a" * size),
    SIZES.map(lambda size: "/".join(["a"] * size)),
    LEVELS.map(lambda size: "[" * size),
    LEVELS.map(lambda size: "[" * size + "]" * size),
    LEVELS.map(lambda size: "{a: " * size + "1" + "}" * size),
    LEVELS.map(lambda size: "? " * size),
    st.sampled_from(ESCAPES).map(lambda escape: f'"{escape}"'),
    st.builds("!!{} {}".format, st.sampled_from(TAGS), st.sampled_from((*WORDS, "''", "[1]", "{a: 1}", "[{a: 1}]"))),
    st.sampled_from(("!x a", "!!python/object/apply:os.system [ls]", "&a [*a]", "&a {b: *a}", "*a", "{[a]: 1}")),
    st.sampled_from(
        ("{1: 2}", "{~: 1}", "{a: 1, a: 2}", "[a, {b: [~]}]", "{? {a: 1} : 2}", "--- 1\n--- 2", "%YAML 9.9")
    ),
    st.text(max_size=30),
)
KINDS = st.sampled_from(sorted(TEXTS))


@st.composite
def cases(draw: Any) -> tuple[str, list[str]]:
    """Draw a recipe of some kind and its overrides, with a hostile value as an override, as a further line, or in the
    middle of the recipe's text."""
    kind, value = draw(KINDS), draw(VALUES)
    text, key = TEXTS[kind], draw(st.sampled_from(KEYS[kind]))
    where = draw(st.sampled_from(("override", "override", "override", "text", "middle", "whole", "key")))
    if where == "override":
        return text, [f"{key}={value}"]
    if where == "key":
        return text, [f"{draw(st.sampled_from((value, f'{key}.{value}')))}=1"]
    if where == "text":
        return f"{text[:-1]},\n {key.partition('.')[0]}x: {value}}}", []
    at = draw(st.integers(0, len(text)))
    return (value if where == "whole" else text[:at] + value + text[at + draw(st.integers(0, 9)) :]), []


@settings(max_examples=50, derandomize=True, deadline=None)
@given(cases())
def test_a_hostile_recipe_can_be_saved_or_is_refused_in_one_line(case):
    recipe_or_error(*case)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(cases())
def test_a_hostile_recipe_can_be_saved_or_is_refused_in_one_line_in_1000_cases(case):
    recipe_or_error(*case)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 1000 + "]" * 1000, "maximum recursion depth"),
        ("!!int abc", "line 1: 'abc' is not a valid int"),
        ("!!float ''", "'' is not a valid float"),
        ("!!bool abc", "'abc' is not a valid bool"),
        ("!!timestamp 1", "could not determine a constructor"),
        ("7" * 5000, "is not a valid int"),
        ("&a [*a]", "maximum recursion depth"),
        ('"\\UFFFFFFFF"', "not YAML"),
        ("a" * (MOST_CHARACTERS + 1), f"longer than {MOST_CHARACTERS} characters"),
    ],
)
def test_files_and_overrides_give_the_same_error(value, message):
    """A hostile value gives the same short error in a file (where the line is named too) and as an override."""
    for line in (recipe_or_error(f"kind: sft\nseed: {value}"), recipe_or_error(TEXTS["sft"], [f"seed={value}"])):
        assert isinstance(line, str), line
        assert message.removeprefix("line 1: ") in line, line
        assert len(line) < 300, line
    assert message in recipe_or_error(TEXTS["sft"], [f"seed={value}"])


def test_control_documents_at_the_limits_are_read() -> None:
    aliases = "[&a [1, 2], " + ", ".join(["*a"] * 3000) + "]"
    assert parse_yaml(aliases, "x") == [[1, 2]] * 3001
    assert isinstance(recipe_or_error(TEXTS["sft"], ["run_name='größer – 大'", "seed=4294967295"]), Recipe)
    assert isinstance(
        recipe_or_error(TEXTS["eval"].replace("{path", "&d {path").replace("tasks: {a", "tasks: {a")), Recipe
    )


@pytest.mark.parametrize("size", [1_000, 50_000])
def test_an_error_does_not_repeat_a_long_value(size):
    for key in ("seed", "model.x", "cache.policy", "dtype", "no_such_key", "data.columns", "a" * size):
        line = recipe_or_error(TEXTS["grpo"], [f"{key}={'z' * size}"])
        assert isinstance(line, str), (key, line)
        assert line.count("z") < 200 + LONGEST * (len(key) == size), (key, line)


@pytest.mark.parametrize("name", [".", "/", "", "..", "a" * 300, "a\0b", "\ud800", "a/" * 3000])
def test_names_that_no_recipe_can_have_are_refused(name):
    with pytest.raises(UserError) as caught:
        load_recipe(name)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < LONGEST


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("value", ["[a]", "{a: 1}", "a", "''", "[]", "[[a, b]]", "&x [*x]", "[a, b]"])
def test_a_yaml_tag_on_any_value_is_read_or_refused_in_one_line(tag, value):
    """A tag may contradict its value: !!map [a] is not a mapping, and !!seq {a: 1} is not a list."""
    for text in (f"!!{tag} {value}", f"seed: !!{tag} {value}", f"[!!{tag} {value}]", f"<<: !!{tag} {value}"):
        try:
            parse_yaml(text, "r.yaml")
        except UserError as error:
            assert str(error).startswith("r.yaml")
            assert len(str(error)) <= 300
        recipe_or_error(f"{{kind: sft, model: m, output_dir: o, seed: !!{tag} {value}}}")
        recipe_or_error(TEXTS["sft"], [f"seed=!!{tag} {value}"])
