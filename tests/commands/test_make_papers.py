"""`make papers` ends with a report that holds an example of each analysis of the papers, by the papers' figures."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAPTIONS = {  # figure of a paper -> beginning or part of the caption of its example
    "G-KV 1, 16": "overlap: ",
    "G-KV 5": "one line for each method.",
    "G-KV 6, 19": "share of the tokens held at the end of right answers",
    "G-KV 7, 17": "positions: ",
    "G-KV 9": "sparsity: ",
    "G-KV 13": "KL divergence per token",
    "G-KV 14, entropy": "Entropy of the next token",
    "G-KV 14, validation": "Mean reward on held-out problems",
    "G-KV 20": "cloud: ",
    "G-KV 21 to 24": "kept_text: ",
    "KVpop 5": "Share of the tokens that the model ranks first",
    "KVpop 6, 9": "kept_heads: ",
    "KVpop 7": "recall: ",
    "KVpop 8": "evict_ratio: ",
    "Attention Matching 2, 7": "Change of the loss if one kv head keeps another ratio",
    "Attention Matching 6, 8": "Head budgets, and shares under global selection",
    "Attention Matching 10, left": "log-perplexity against seconds",
    "Attention Matching 10, right": "accuracy against log-perplexity",
    "LuKA 1": "attention: ",
}


def lacking(page: str) -> list[str]:
    """Return the figures without an example on a page."""
    captions = [html.unescape(caption) for caption in re.findall(r"<figcaption>(.*?)</figcaption>", page, re.S)]
    return [figure for figure, words in CAPTIONS.items() if not any(words in caption for caption in captions)]


@pytest.mark.slow
def test_the_report_of_make_papers_holds_each_analysis(tmp_path):
    subprocess.run([sys.executable, ROOT / "benchmarks/papers.py", tmp_path / "papers"], check=True, cwd=tmp_path)
    assert lacking((tmp_path / "papers" / "report.html").read_text()) == []


def test_control_an_absent_analysis_is_named():
    page = "".join(f"<figcaption>{html.escape(words)}</figcaption>" for words in CAPTIONS.values())
    assert lacking(page) == []
    assert lacking(page.replace("<figcaption>recall: ", "<figcaption>")) == ["KVpop 7"]
