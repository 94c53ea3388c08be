"""Check the project's style of writing (CONTRIBUTING.md) for patterns that a machine can find."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for folder in ("sparse_rl", "rollout", "trainer", "rewards", "recipes", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.yaml")])
OPENINGS = ("Whether", "How", "What", "Which", "Who", "So many")  # of a docstring
PHRASES = re.compile(r"\b(so many|whoever|of which it is)\b", re.IGNORECASE)
EMPTY_NAMES = {"told", "mine", "said", "found", "gone", "nothing", "known", "each"}  # they do not say what they hold
BAD_EXAMPLE = '''
def test_company_changes_nothing():
    """Whether it is so."""
    told, (mine, right) = 1, (2, 3)
    for each in ():
        pass
'''


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring, including those below a dataclass's fields."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def bad_openings(tree: ast.AST) -> list[str]:
    opened = ((line, text) for line, text in docstrings(tree) if re.match(rf"({'|'.join(OPENINGS)})\b", text))
    return [f"{line}: {text.splitlines()[0]}" for line, text in opened]


def empty_names(tree: ast.AST) -> list[str]:
    """Return "line: name" of each local variable with an empty name. Fields of classes are not checked."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    empty = {node for node in names if isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES}
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    local = {node for function in functions for node in ast.walk(function)} if empty else set()
    return [f"{node.lineno}: {node.id}" for node in empty & local]


def test_code_is_written_in_plain_english():
    refused = []
    for path in SOURCES:
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            patterns = [*bad_openings(tree), *empty_names(tree), *PHRASES.findall(text)]
            refused += [f"{path.relative_to(ROOT)}:{pattern}" for pattern in patterns]
    assert refused == []


def test_pages_are_written_in_plain_english():
    """One section of CONTRIBUTING.md quotes refused phrases, and is left out."""
    refused = []
    for path in PAGES:
        text = re.sub(r"## How we write.*?(?=\n## |\Z)", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        refused += [f"{path.relative_to(ROOT)}: {phrase}" for phrase in PHRASES.findall(text)]
    assert refused == []


def test_control_bad_patterns_are_found():
    tree = ast.parse(BAD_EXAMPLE)
    assert bad_openings(tree) == ["3: Whether it is so."]
    assert sorted(empty_names(tree)) == ["4: mine", "4: told", "5: each"]
    assert PHRASES.findall("as many rows, so many tokens") == ["so many"]
