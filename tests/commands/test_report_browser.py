"""A report in headless Chromium: no error, nothing wider than the screen, reached by keyboard, readable, and fast.

The rules of accessibility are those of axe-core: set AXE to the path of its axe.min.js to check them.
"""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from browser import Tab, browser

from sparse_rl.analysis.report import Section, html, packed, page
from sparse_rl.commands.main import main
from sparse_rl.trace import EvictionTrace

pytestmark = pytest.mark.slow

DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
SHOWN = """new Promise(done => { const look = () => {
  document.querySelector('.completion')?.scrollIntoView();  // only the text on the screen is coloured
  document.querySelector('.completion .text span[class]') ? done(true) : setTimeout(look, 20); }; look(); })"""
MOVES = """(async () => {
  const slider = document.querySelector('.completion .query'), times = [];
  const real = window.requestAnimationFrame;
  for (let i = 1; i <= 30; i++) {
    slider.value = Math.floor(slider.max * i / 31);
    let spent = 0;
    window.requestAnimationFrame = work => real(now => {
      const start = performance.now();
      work(now);
      spent += performance.now() - start;
    });
    const start = performance.now();
    slider.dispatchEvent(new Event('input'));
    spent += performance.now() - start;
    window.requestAnimationFrame = real;
    await new Promise(done => real(() => setTimeout(done, 5)));
    times.push(spent);
  }
  return times.sort((a, b) => a - b);
})()"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the report of some rollouts of the quickstart's model."""
    folder = tmp_path_factory.mktemp("report")
    cache = "cache={policy: gkv, budget: 24, window: 4, period: 4}"
    command = ["rollout", "quickstart/grpo", "model=quickstart/model", cache, "max_completion_length=90"]
    assert (
        main([*command, "rollout.engine=hf", "num_generations=2", "--problems", "2", "--out", str(folder / "rollouts")])
        == 0
    )
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_has_no_error_and_fits_the_screen(width, scheme, report, tmp_path):
    with browser() as tab:
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.resize(width, 1000)
        tab.open(report)
        assert tab.run(SHOWN)
        assert tab.run(DRAWN)
        assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0
        check_accessibility(tab)
        tab.picture(tmp_path / "page.png")
        assert tab.errors == []


def check_accessibility(tab: Tab) -> None:
    if not (file := os.environ.get("AXE")):
        return
    tab.run(Path(file).read_text(encoding="utf-8"))
    violations = tab.run("axe.run(document).then(all => all.violations.map(one => `${one.id}: ${one.nodes[0].html}`))")
    assert violations == []


def test_the_keyboard_reaches_every_control_and_moves_through_time(report):
    with browser() as tab:
        tab.resize(1440, 1000)
        tab.open(report)
        tab.run(SHOWN)
        reached = set()
        for _ in range(60):
            tab.press("Tab", 9)
            reached.add(tab.run("document.activeElement.className || document.activeElement.tagName"))
        assert {"query", "play", "go", "layer", "head", "token", "text", "SUMMARY", "A"} <= reached
        tab.run("document.querySelector('.completion .text').focus()")
        before = tab.run("Number(document.querySelector('.completion .query').value)")
        for _ in range(8):
            tab.press("ArrowLeft", 37)
        tab.run(DRAWN)
        assert tab.run("Number(document.querySelector('.completion .query').value)") == before - 8
        assert tab.run("document.querySelectorAll('.completion .later').length") > 0
        assert tab.errors == []


def test_colours_say_what_the_trace_says(tmp_path):
    evict_at = torch.full((1, 2, 8), 2**30, dtype=torch.int32)
    evict_at[0, 0, 1] = evict_at[0, :, 2] = 3
    data = packed(EvictionTrace(evict_at), list("abcdefgh"), 2)
    (tmp_path / "page.html").write_text(page("t", "a", [Section("s", "s", html.sample("line", data, True))]))
    classes = "[...document.querySelectorAll('.completion .text span')].map(span => span.className)"
    with browser() as tab:
        tab.resize(1440, 1000)
        tab.open(tmp_path / "page.html")
        tab.run(SHOWN)
        tab.run(DRAWN)
        assert tab.run(classes) == ["k5", "k3", "k0", "k5", "k5", "k5", "k5", "now-written"]
        move = "const s = document.querySelector('.query'); s.value = 2; s.dispatchEvent(new Event('input'));"
        tab.run(f"(() => {{ {move} }})()")
        tab.run(DRAWN)
        assert tab.run(classes) == ["k5", "k5", "k5", "now-written", "later", "later", "later", "later"]


def test_a_long_completion_opens_and_moves_quickly(tmp_path):
    """28 layers of 8 kv heads and 32,768 tokens, each evicted at a time of its own."""
    length = 32_768
    generator = torch.Generator().manual_seed(0)
    lives = 1024 + torch.empty(28, 8, length).exponential_(1 / 1500, generator=generator).long()
    trace = EvictionTrace.recorded(torch.arange(length) + lives)
    words = ["\n" if number % 29 == 0 else f" word{number % 97}" for number in range(length)]
    file = tmp_path / "page.html"
    file.write_text(page("t", "a", [Section("s", "s", html.sample("line", packed(trace, words, 300), True))]))
    assert file.stat().st_size <= 25e6
    with browser() as tab:
        tab.resize(1440, 1000)
        tab.open(file)
        tab.run(SHOWN)
        tab.run(DRAWN)
        times = tab.run(MOVES)
        assert times[len(times) // 2] <= 50, times
        assert tab.errors == []


@pytest.mark.parametrize(("scheme", "paper"), [("light", "#ffffff"), ("dark", "#14171c")])
def test_no_picture_has_a_background_or_an_ink_of_its_own(scheme, paper, report):
    """The edge of a picture has the page's colour, and its ink contrasts; the control is a picture without the rule."""
    expected = sum(int(paper[i : i + 2], 16) for i in (1, 3, 5)) / 3 / 255
    with browser() as tab:
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        tab.resize(1440, 1000)
        tab.open(report)
        shades = picture_shades(tab)
        assert abs(shades[2, 2] - expected) < 0.01
        assert max(shades.max() - expected, expected - shades.min()) > 0.6
        tab.run("document.querySelector('figure img').style.filter = 'invert(0)'")
        assert (abs(picture_shades(tab)[2, 2] - expected) < 0.01) == (scheme == "light")


def picture_shades(tab: Tab) -> Any:
    """Return the brightness of the first picture's pixels, float [height, width] from 0 to 1."""
    box = tab.run("document.querySelector('figure img').getBoundingClientRect().toJSON()")
    clip = {name: box[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
    shot = tab.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(shot)))[..., :3].mean(-1)
