"""The parts of a report as HTML, from plain values. All text is escaped here; nothing is loaded from a network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
START = """
for (const holder of document.querySelectorAll("details.sample")) {
  const show = async () => {
    if (!holder.open || holder.dataset.shown) return;
    holder.dataset.shown = "yes";
    const data = JSON.parse(holder.querySelector("script").textContent);
    await Completion.show(holder.querySelector("div"), data);
  };
  holder.addEventListener("toggle", show);
  show();
}
"""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading, to which the menu at the top leads.

    name : name of the section in links;  body : HTML
    """

    name: str
    title: str
    body: str


def page(title: str, about: str, sections: Sequence[Section]) -> str:
    """Return the whole page. Sections without a body are left out."""
    shown = [section for section in sections if section.body]
    menu = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in shown)
    parts = "\n".join(
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>\n{section.body}\n</section>'
        for section in shown
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p>{escape(about)}</p></header>
<nav aria-label="sections"><ul>{menu}</ul></nav>
<main>
{parts}
</main>
<script>
{_asset("completion.js")}{START}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]], label: str, text: Sequence[str] = ()) -> str:
    """Return a table; wide tables scroll within their frame.

    label : name of the table for screen readers
    text : headings of the columns that hold text, which are aligned to the left
    """
    left = {place for place, name in enumerate(headings) if name in text}

    def cell(kind: str, place: int, value: Any) -> str:
        aligned = ' class="text-cell"' if place in left else ""
        scope = ' scope="col"' if kind == "th" else ""
        return f"<{kind}{scope}{aligned}>{escape('' if value is None else str(value))}</{kind}>"

    head = "".join(cell("th", place, name) for place, name in enumerate(headings))
    body = "".join(
        "<tr>" + "".join(cell("td", place, value) for place, value in enumerate(row)) + "</tr>" for row in rows
    )
    frame = f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}">'
    return f"{frame}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def picture(file: Path, about: str) -> str:
    """Return a picture with its description, which also is the caption. The file's bytes become part of the page."""
    data = base64.b64encode(file.read_bytes()).decode()
    source = f"data:{KINDS[file.suffix]};base64,{data}"
    return f'<figure><img src="{source}" alt="{escape(about)}"><figcaption>{escape(about)}</figcaption></figure>'


def pictures(parts: Sequence[str]) -> str:
    """Return pictures side by side where the page is wide enough."""
    return f'<div class="pictures">{"".join(parts)}</div>' if parts else ""


def folded(title: str, body: str) -> str:
    """Return a part that opens by a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def source(text: str, label: str) -> str:
    """Return a text in a typewriter face, such as a recipe."""
    return f'<pre tabindex="0" role="region" aria-label="{escape(label)}">{escape(text)}</pre>'


def sample(title: str, data: Mapping[str, Any], opened: bool) -> str:
    """Return a coloured completion (completion.py), which the browser builds when it is opened."""
    content = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    state = " open" if opened else ""
    return (
        f'<details class="sample"{state}><summary>{escape(title)}</summary><div></div>'
        f'<script type="application/json">{content}</script></details>'
    )
