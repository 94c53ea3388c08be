"""docs/tutorials/replay.ipynb is complete and its claims hold. The tests do not need Jupyter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/tutorials/replay.ipynb"
SHOWS = ("print(", "plt.show()")  # a cell with one of these has an output
IN_ONE_NAMESPACE = """
import json, sys
names = {"__name__": "__main__"}
for number, source in enumerate(json.load(open(sys.argv[1])), 1):
    exec(compile(source, f"code cell {number}", "exec"), names)
found = {f"{kind}, {policy}": gap for (kind, policy), gap in names["largest"].items()}
with open(sys.argv[2], "w") as file:
    json.dump({"gaps": found, "accuracy": names["accuracy"]}, file)
"""


def cells(kind: str) -> list[dict[str, Any]]:
    """Return the notebook's cells of one kind, "code" or "markdown"."""
    return [cell for cell in json.loads(FILE.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(kind)]


def texts(cell: dict[str, Any]) -> list[str]:
    """Return all text in the outputs of a code cell."""
    outputs = cell["outputs"]
    return ["".join(o.get("text", ())) + "".join(o.get("data", {}).get("text/plain", ())) for o in outputs]


def anchor(heading: str) -> str:
    """Return the anchor by which a link names a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_file_is_a_valid_notebook_of_at_most_400_kb():
    notebook = json.loads(FILE.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[\w-]{1,64}", cell_id) for cell_id in ids)
    assert FILE.stat().st_size <= 400_000


def test_cells_were_executed_once_in_order():
    code = cells("code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for number, cell in enumerate(code, 1):
        shows = any(word in "".join(cell["source"]) for word in SHOWS)
        assert bool(cell["outputs"]) == shows, f"code cell {number}"
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data"), f"code cell {number}"
            assert output.get("name", "stdout") == "stdout", f"code cell {number} has a warning"


def test_outputs_contain_no_local_paths():
    path = re.compile(r"(?:^|[\s'\"=(])(?:/|~/|[A-Z]:\\)\w")
    assert path.search("saved to /tmp/x")
    assert path.search("'~/x'")
    assert not path.search("a/b and 1 / 2")
    for number, cell in enumerate(cells("code"), 1):
        assert not any(path.search(text) for text in texts(cell)), f"code cell {number}"


def test_every_link_leads_to_a_file_and_heading_of_this_repository():
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", "\n".join(sources("markdown")))
    assert len(links) > 10
    for link, heading in links:
        target = FILE.parent / link
        assert "://" not in link, link
        assert target.is_file(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert heading in map(anchor, headings), f"{link}#{heading}"


def test_code_cells_are_plain_python():
    for source in sources("code"):
        compile(source, "a cell", "exec")  # the code has no magics and no shell lines


@pytest.mark.slow
def test_the_claims_of_the_notebook_hold(tmp_path):
    (tmp_path / "cells.json").write_text(json.dumps(sources("code")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    words = [sys.executable, "-c", IN_ONE_NAMESPACE, "cells.json", "found.json"]
    process = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["accuracy"]["replayed"] > report["accuracy"]["before RL"] + 0.3
    gaps = report["gaps"]
    assert gaps.pop("kv heads exchanged, streaming") <= 1e-5, "streaming drops the same tokens in all heads"
    right = {name: gap for name, gap in gaps.items() if name.startswith("as recorded")}
    wrong = {name: gap for name, gap in gaps.items() if name not in right}
    assert len(right) == 2
    assert max(right.values()) <= 1e-5
    assert len(wrong) == 5
    assert min(wrong.values()) > 1e-3
    printed = sum(len(text.splitlines()) for cell in cells("code") for text in texts(cell) if "<Figure" not in text)
    assert len(process.stdout.splitlines()) == printed, "the outputs are of another version of the code"
    assert {path.name for path in tmp_path.iterdir()} == {"cells.json", "found.json"}, (
        "the notebook leaves files behind"
    )
