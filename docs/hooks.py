"""What the site has beyond the pages of this folder; MkDocs calls the functions `on_*`. `make docs` runs it.

The README, CONTRIBUTING and CHANGELOG of the repository, the notebooks as Markdown, and a page for each package that
says what it offers (`__all__`). Whatever is logged as a warning here fails `make docs`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from posixpath import normpath, relpath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGES = ("sparse_rl", "rollout", "trainer", "rewards")
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
# What one calls first opens a package's page; the rest follows in the order of `__all__`.
FIRST = {
    "sparse_rl.trace": ["EvictionTrace", "NEVER", "load_traces", "save_traces"],
    "sparse_rl.policies": ["make_policy", "Policy"],
    "sparse_rl.methods.config": ["accepted_parameters", "CONFIGS"],
    "sparse_rl.kernels": ["running_topk"],
    "sparse_rl.attention": ["replay_logprobs", "make_view", "future_attention_mass"],
    "sparse_rl.recipe": ["load_recipe", "make_recipe", "list_recipes", "Run"],
    "rollout": ["make_engine", "Engine", "SamplingConfig", "Rollout"],
    "rollout.context": ["PromptCacheConfig", "load_context", "save_context"],
    "rewards": ["make_rewards"],
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)((?:#[^)]*)?)\)")
ENTRY = re.compile(r"(\w+(?:, \w+)*) : (.*)")
log = logging.getLogger("mkdocs.hooks.site")


# ---- pages that stand elsewhere ----------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand elsewhere or are made of the code."""
    for source, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
        page = notebook.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=_notebook(notebook)))
    for name, content in _api_pages():
        files.append(File.generated(config, f"api/{name}.md", content=content))
    sys.path.insert(0, str(ROOT))
    from docs.reference import keys_page, trl_page  # which needs the repository on the path

    files.append(File.generated(config, "recipes.md", content=keys_page()))
    files.append(File.generated(config, "trl_options.md", content=trl_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are right in the repository become links as they are right in the site.

    What is no page, a recipe for one, loses its link there. Where it does not exist either, MkDocs finds no target.
    """
    place = page.file.src_uri
    origin = next((source for source, made in FROM_ROOT.items() if made == place), f"docs/{place}")

    def mend(link: re.Match) -> str:
        target = normpath(f"{origin}/../{link[2]}")
        if target not in FROM_ROOT and not target.startswith("docs/") and (ROOT / target).exists():
            return link[1]
        inside = FROM_ROOT.get(target) or target.removeprefix("docs/").replace(".ipynb", ".md")
        return f"[{link[1]}]({relpath(inside, place + '/..')}{link[3]})"

    return LINK.sub(mend, markdown)


def _notebook(file: Path) -> str:
    """A notebook's cells and outputs."""
    pieces = []
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        pieces.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                pieces.append(f"![](data:image/png;base64,{''.join(data['image/png']).strip()})")
            else:
                text = "".join(output.get("text") or data.get("text/plain", "")).rstrip()
                pieces.append(f"```text\n{text}\n```")
    return "\n\n".join(pieces)


# ---- the API -----------------------------------------------------------------------------------------------


def _api_pages():
    """Of each package that has `__all__`: its name, and a page of all that it offers."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)])
    for package in PACKAGES:
        loader.load(package, try_relative_path=False)
    loader.resolve_aliases()
    packages = [loader.modules_collection[package] for package in PACKAGES]
    while packages:
        package = packages.pop(0)
        packages += [m for m in package.modules.values() if m.is_subpackage or m.path == "sparse_rl.methods.config"]
        if package.exports:
            first = FIRST.get(package.path, [])
            names = list(dict.fromkeys([*first, *(str(name) for name in package.exports)]))
            for name in names:
                _check_docstrings(package[name])
            about = package.docstring.value.split("\n\n")[0].split("\n")[0]
            shown = "\n\n".join(f"::: {package.path}.{name}" for name in names)
            yield package.path, f"# {package.path}\n\n{about}\n\n{shown}\n"


def _check_docstrings(offered: griffe.Object | griffe.Alias) -> None:
    """Warns of what is offered without a docstring; a method may have that of the method that it overrides."""
    if not offered.has_docstring:
        log.warning(f"no docstring: {offered.path}")
    if not offered.is_class:
        return
    for name, member in offered.members.items():
        public = (member.is_function or "property" in member.labels) and not name.startswith("_")
        if public and not any(name in c.members and c.members[name].has_docstring for c in (offered, *offered.mro())):
            log.warning(f"no docstring: {offered.path}.{name}")


class Docstrings(griffe.Extension):
    """Makes Markdown of a docstring: lists of its entries, `name : text`, whose further lines are indented; bold words
    of its headings, which would be headings of the page."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """Called of everything that is read."""
        if obj.docstring is None:
            return
        if obj.parent is not None and obj.parent.is_module and not obj.is_attribute:
            obj.docstring.value += f"\n\n(`{obj.relative_package_filepath}`)"
        lines: list[str] = []
        inside = False
        for line in obj.docstring.value.splitlines():
            if lines and line and set(line) == {"-"}:
                lines[-1:] = ["", f"**{lines[-1]}**", ""]
                continue
            entry = ENTRY.fullmatch(re.sub(r"^(\w+Error)$", r"\1 : ", line))  # an error stands alone in its line
            if entry and not inside and lines and lines[-1]:
                lines.append("")
            if entry:
                inside, line = True, f"- `{entry[1]}`: {entry[2]}"
            elif inside and line and not line.startswith(" "):
                inside = False
                lines.append("")
            lines.append(line)
        obj.docstring.value = "\n".join(lines)
