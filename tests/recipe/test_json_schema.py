"""The JSON Schema of recipes accepts every recipe that the loader accepts, and refuses recipes of a wrong shape.

The shape is the set of keys, their types, and the required keys. Only the loader checks the rest: bounds of values, and
conditions between keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from jsonschema import Draft202012Validator as Validator
from test_hostile_recipes import KEYS, TEXTS

from sparse_rl.commands.main import main
from sparse_rl.config import Source, coerce, own_fields
from sparse_rl.errors import UserError
from sparse_rl.methods.config import CONFIGS as POLICIES
from sparse_rl.methods.kvpop.config import SCORER_CONFIGS as SCORERS
from sparse_rl.recipe import KINDS, list_recipes, load_recipe, make_recipe
from sparse_rl.recipe.keys import holders, list_sections
from sparse_rl.recipe.load import _shipped
from sparse_rl.recipe.options import PASSED_THROUGH
from sparse_rl.recipe.schema import SchemaWriter, recipe_schema
from sparse_rl.recipe.yaml_text import apply_overrides, parse_yaml

ALL = recipe_schema()
VALIDATOR = Validator(ALL)
VALIDATOR_OF = {kind: Validator(recipe_schema(kind)) for kind in KINDS}


def recipe_with(kind: str, *overrides: str, without: str | None = None) -> dict[str, Any]:
    """Return a valid recipe of that kind as a mapping, after overrides, and without one key."""
    mapping = parse_yaml(TEXTS[kind], kind)
    mapping.pop(without, None)
    apply_overrides(mapping, overrides)
    return mapping


def refusal(mapping: dict[str, Any]) -> str | None:
    """Return the loader's error for a recipe, or None if the loader accepts the recipe."""
    try:
        make_recipe(json.loads(json.dumps(mapping)))
    except UserError as error:
        return str(error)
    return None


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside it."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from parts(inner)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_schema_is_valid_and_all_its_definitions_are_used(kind: str | None) -> None:
    schema = recipe_schema(kind)
    Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    referred = {part["$ref"].removeprefix("#/$defs/") for part in parts(schema) if "$ref" in part}
    assert referred == schema["$defs"].keys()


def test_dataclass_names_are_unique() -> None:
    """The schema's definitions are named after the dataclasses of all kinds, policies, scorers and their blocks."""
    names: set[type] = set(POLICIES.values()) | set(SCORERS.values())
    waiting = [*KINDS.values(), *names]
    while waiting:
        for holder in holders(waiting.pop()):
            held = [member for hint in own_fields(holder).values() for member in blocks(hint)]
            waiting += [entry for entry in held if entry not in names]
            names |= {*held}
    assert len({cls.__name__ for cls in names}) == len(names) > 25


def blocks(hint: Any) -> list[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [block for member in get_args(hint) for block in blocks(member)]


def forms(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the schemas that a value, or an element of a list, may match."""
    yield schema
    for inner in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        yield from forms(inner)


def dotted_keys(schema: dict[str, Any], prefix: str, seen: set[str]) -> Iterator[str]:
    """Return the dotted keys of a schema in the schema's order; the keys of a definition come at the first use of the
    definition."""
    for key, value in schema["properties"].items():
        places = [*forms(value)]
        named = [place["additionalProperties"] for place in places if place.get("additionalProperties")]
        yield f"{prefix}{key}" + (".NAME" if any("$ref" in place for place in named) else "")
        for place in (*places, *named):
            name = place.get("$ref", "").removeprefix("#/$defs/")
            if name in ALL["$defs"] and name not in seen and "properties" in ALL["$defs"][name]:
                seen.add(name)
                inner = f"{prefix}{key}.NAME." if place in named else f"{prefix}{key}."
                yield from dotted_keys(ALL["$defs"][name], inner, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_keys_equal_the_keys_of_the_reference(kind: str) -> None:
    """For each kind of recipe, the schema has the keys that the site's page lists, in the same order."""
    rows = [row.key for section in list_sections(KINDS[kind]) for row in section.rows]
    assert list(dotted_keys(ALL["$defs"][f"kind_{kind}"], "", set())) == ["kind", *rows, *PASSED_THROUGH.get(kind, {})]


@pytest.mark.parametrize("config", [*POLICIES.values(), *SCORERS.values()], ids=lambda config: config.__name__)
def test_keys_of_policies_and_scorers_equal_those_of_the_reference(config: Any) -> None:
    (section,) = list_sections(config)
    definition = ALL["$defs"][config.__name__]
    assert list(dotted_keys(definition, "", set())) == [config.name_key, *(row.key for row in section.rows)]
    required = [row.key for row in section.rows if row.default == "required" and "." not in row.key]
    assert definition["required"] == [config.name_key, *required]


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_in_the_schema_equal_those_of_the_resolved_recipe(kind: str) -> None:
    given, resolved = parse_yaml(TEXTS[kind], kind), make_recipe(parse_yaml(TEXTS[kind], kind)).resolved()
    properties = VALIDATOR_OF[kind].schema["properties"]
    defaults = {key: value["default"] for key, value in properties.items() if "default" in value and key not in given}
    assert len(defaults) >= 5
    assert {key: resolved[key] for key in defaults} == defaults


def test_every_default_in_the_schema_matches_its_own_type() -> None:
    results = [part for part in parts(ALL) if "default" in part and "description" in part]
    wrong = [part for part in results if not Validator(part | {"$defs": ALL["$defs"]}).is_valid(part["default"])]
    assert not wrong
    assert len(results) > 200
    assert ALL["$defs"]["DMSConfig"]["properties"]["scorer"]["default"] == {
        "name": "mlp",
        "gamma": None,
        "hidden": None,
    }


@pytest.mark.parametrize("name", list_recipes())
@pytest.mark.few(33)
def test_the_schema_accepts_each_shipped_recipe(name: str) -> None:
    """Both the recipe as written and the recipe with all keys resolved are accepted."""
    mapping = parse_yaml(_shipped()[name].read_text(encoding="utf-8"), name)
    for item in (mapping, load_recipe(name).resolved()):
        errors = [*VALIDATOR.iter_errors(item), *VALIDATOR_OF[item["kind"]].iter_errors(item)]
        assert not errors, errors[0]


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("grpo", ["cache=full"]),
        ("grpo", ["rewards=math"]),
        ("grpo", ["rewards=[{name: format, weight: 0.1, style: think}, mine.py:fair]"]),
        ("grpo", ["lora=null", "lora={target_modules: [q_proj]}"]),
        ("grpo", ["report_to=wandb", "optim=sgd", "lr_scheduler_kwargs={a: 1}"]),
        ("grpo", ["cache={policy: kvpop, budget: 512, scorer: linear}", "lora=null", "scorers={}"]),
        ("grpo", ["cache={policy: dms, scorer: {name: mlp, hidden: 8}}", "lora=null"]),
        ("grpo", ["cache={policy: layered, parts: {layers: 1, cache: clustered}}"]),
        ("distill", ["keep={name: math, timeout: 9}"]),
        ("sft", ["max_length=null", "learning_rate=1"]),
        ("eval", ["cache=null"]),
        ("eval", ["cache={window: 8}", "sweep={policy: [full, {policy: tova}], cache: {budget: 16}}"]),
        ("eval", ["cache=tova", "sweep={cache: {budget: [16]}}"]),
        ("eval", ["cache=null", "sweep={policy: {policy: gkv, budget: 64}}"]),
        (
            "eval",
            ["cache=null", "prompt_cache={ratio: 0.1, queries: random}", "tasks.a.columns={context: c}"],
        ),
        ("perplexity", ["sweep={policy: [full, h2o], cache: {budget: [8, 12]}}", "cache={sinks: 1}"]),
    ],
)
def test_the_schema_accepts_short_forms_of_values(kind: str, overrides: list[str]) -> None:
    """The loader accepts forms such as `cache: full` or one reward instead of a list; so does the schema."""
    mapping = recipe_with(kind, *overrides)
    assert refusal(mapping) is None
    assert VALIDATOR.is_valid(mapping)
    assert VALIDATOR_OF[kind].is_valid(mapping)


@pytest.mark.parametrize(
    ("kind", "override"),
    [
        *((kind, "no_such_key=1") for kind in KINDS),
        *((kind, "seed=many") for kind in KINDS),
        *((kind, "model=null") for kind in KINDS),
        *((kind, "dtype=float31") for kind in KINDS),
        *((kind, "trainer_options={}") for kind in KINDS),
        *((kind, "cache=gvk") for kind in KINDS),
        *((kind, "cache={policy: gvk, budget: 64}") for kind in KINDS if kind != "sft"),
        *((kind, "cache={budget: 64}") for kind in KINDS if kind != "sft"),
        *((kind, "cache={policy: gkv}") for kind in KINDS if kind != "sft"),
        *((kind, "cache=gkv") for kind in KINDS if kind != "sft"),
        *((kind, "cache={policy: full, budget: 64}") for kind in KINDS if kind != "sft"),
        *((kind, "cache={policy: kvpop, budget: 512, scorer: mpl}") for kind in KINDS if kind != "sft"),
        *((kind, "cache={policy: kvpop, budget: 512, period: 1}") for kind in KINDS if kind != "sft"),
        ("grpo", "cache={policy: kvpop, budget: 512, scorer: {hidden: 8}}"),
        ("grpo", "cache={policy: layered, parts: [{layers: 1}]}"),
        ("grpo", "cache={policy: layered, parts: [{layers: 1, cache: gvk}]}"),
        ("grpo", "cache=null"),
        ("grpo", "cache=3"),
        ("grpo", "rollout.no_such_key=1"),
        ("grpo", "validation.data.no_such_key=1"),
        ("grpo", "validation={every: 2}"),
        ("grpo", "data.synthetic={task: running_sum}"),
        ("grpo", "launch=null"),
        ("grpo", "launch.zero_stage=true"),
        ("grpo", "launch.zero_stage=4"),
        ("grpo", "gradient_checkpointing=1"),
        ("grpo", "rewards=[3]"),
        ("grpo", "lora.target_modules=[a, 1]"),
        ("grpo", "optim=adamw_torhc"),
        ("grpo", "use_vllm=true"),
        ("grpo", "stop_at_accuracy=0.9"),
        ("sft", "delta=1"),
        ("sft", "kind=stf"),
        ("sft", "kind=null"),
        ("eval", "optim=sgd"),
        ("eval", "tasks.a.no_such_key=1"),
        ("eval", "tasks=[a]"),
        ("eval", "prompt_cache=[{polic: am}]"),
        ("eval", "sweep={policy: [{budget: 4}]}"),
        ("eval", "sweep={policy: gvk, cache: {budget: 4}}"),
        ("eval", "sweep={policy: {policy: tova, x: 1}, cache: {budget: 4}}"),
        ("eval", "sweep={polic: full}"),
    ],
)
def test_schema_and_loader_refuse_a_recipe_of_wrong_shape(kind: str, override: str) -> None:
    mapping = recipe_with(kind, override)
    assert refusal(mapping) is not None
    assert not VALIDATOR.is_valid(mapping)
    assert not VALIDATOR_OF[kind].is_valid(mapping)


@pytest.mark.parametrize("kind", KINDS)
def test_schema_and_loader_refuse_a_missing_required_key(kind: str) -> None:
    required = VALIDATOR_OF[kind].schema["required"]
    assert {"kind", "model", "output_dir"} <= {*required}
    assert VALIDATOR.is_valid(recipe_with(kind))
    for key in required:
        mapping = recipe_with(kind, without=key)
        assert "missing" in str(refusal(mapping))
        assert not VALIDATOR.is_valid(mapping)
        assert not VALIDATOR_OF[kind].is_valid(mapping)


def test_a_schema_error_refers_to_the_key_and_the_named_policy() -> None:
    """For a wrong parameter of gkv the validator reports gkv's parameters alone, not those of all policies. For a wrong
    value it reports the key.
    """
    (error,) = VALIDATOR.iter_errors(recipe_with("grpo", "cache={policy: gkv, budget: 64, budge: 3}"))
    messages = [inner.message for inner in error.context]
    assert any("'budge' was unexpected" in message for message in messages)
    assert len(messages) == 2
    (error,) = VALIDATOR.iter_errors(recipe_with("grpo", "temperature=hot"))
    assert error.json_path == "$.temperature"


# ---- properties of every type and every key --------------------------------------------------------------------------

VALUES = (None, True, 0, 1, 2.5, "text", [], ["text"], [1], [None], {}, {"a": 1}, {"a": "text"})


def unbounded(hint: Any) -> Any:
    """Return a type without the bounds on its values."""
    if get_origin(hint) is Annotated:
        return unbounded(get_args(hint)[0])
    if get_origin(hint) is Literal or not get_args(hint):
        return hint
    members = tuple(map(unbounded, get_args(hint)))
    if get_origin(hint) in (list, dict):
        return get_origin(hint)[members]
    made = members[0]
    for member in members[1:]:
        made = made | member
    return made


def hints() -> dict[str, Any]:
    """Return every type of a key that is not a block, by the repr of the type."""
    results: dict[str, Any] = {}
    waiting: list[Any] = [*KINDS.values(), *POLICIES.values(), *SCORERS.values()]
    seen: set[Any] = set()
    while waiting:
        for holder in holders(waiting.pop()):
            if holder in seen:
                continue
            seen.add(holder)
            for hint in own_fields(holder).values():
                waiting += blocks(hint)
                results |= {} if blocks(hint) else {str(unbounded(hint)): unbounded(hint)}
    results["a union that is no list of one value"] = list[int] | bool
    passed_through = (unbounded(hint) for options in PASSED_THROUGH.values() for hint in options.values())
    return results | {str(hint): hint for hint in passed_through}


@pytest.mark.parametrize("hint", [pytest.param(hint, id=name[:60]) for name, hint in hints().items()])
def test_the_schema_of_a_type_accepts_the_same_values_as_the_loader(hint: Any) -> None:
    """For each type of a key, without its bounds, the schema accepts a value if and only if the loader does."""
    validator = Validator(SchemaWriter().type(hint))
    choices = [choice for member in (hint, *get_args(hint)) for choice in get_args(member)]
    for value in (*VALUES, *(choice for choice in choices if isinstance(choice, str | int))):
        try:
            coerce(value, hint, "key", Source())
        except UserError:
            assert not validator.is_valid(value), value
        else:
            assert validator.is_valid(value), value


SHAPES = (
    "unknown key", "unknown column", "missing", "unknown cache policy", "unknown scorer", "has no parameter",
    "needs a budget", "is a name or",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(2)
def test_the_schema_agrees_with_the_loader_for_each_key(kind: str) -> None:
    """Each key gets several values, and each block an unknown key. The schema accepts all recipes that the loader
    accepts, and refuses those that the loader refuses for their shape."""
    accepted = refused = 0
    for key in KEYS[kind]:
        for value in ("null", "1", "text", "{no_such_key: 1}"):
            try:
                mapping = recipe_with(kind, f"{key}={value}")
            except UserError:  # the key is inside a block that is null in the recipe
                continue
            line = refusal(mapping)
            valid = VALIDATOR_OF[kind].is_valid(mapping)
            assert valid or line is not None, (key, value, next(VALIDATOR_OF[kind].iter_errors(mapping)).message)
            accepted += line is None
            if line is not None and any(shape in line for shape in SHAPES) and "columns" not in key:
                refused += 1
                assert not valid, (key, value, line)
    assert accepted > 10
    assert refused > 2


def test_a_recipe_that_begins_with_the_line_for_editors_is_read() -> None:
    """A recipe may begin with the line from the page of keys that names the schema for an editor. The loader reads this
    line as a comment."""
    text = "# yaml-language-server: $schema=sparse-rl.schema.json\n" + yaml.safe_dump(recipe_with("sft"))
    assert make_recipe(parse_yaml(text, "x")).kind == "sft"


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_command_prints_the_schema(kind, capsys):
    assert main(["keys", "--json-schema", *([kind] if kind else [])]) == 0
    assert json.loads(capsys.readouterr().out) == recipe_schema(kind)
    assert main(["keys", "policies", "--json-schema"]) == 2
    assert "--json-schema: needs one kind of recipe, or none for all recipes: grpo," in capsys.readouterr().err
