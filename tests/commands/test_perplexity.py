"""`sparse-rl perplexity` cuts a text into pieces, prefills the first tokens of each piece (the prompt) and measures the
loss of the other tokens, decoded one by one under a cache policy. With a full cache the result equals a plain forward
pass. The tests also cover output, files and errors.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl.commands.main import main
from sparse_rl.commands.perplexity import measure
from sparse_rl.data.tokens import read_pieces
from sparse_rl.errors import UserError
from sparse_rl.recipe import PerplexityRecipe, make_recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes/quickstart/model"
STORIES = ROOT.parent / "shared/models/stories260K"  # optional, outside the repository
STORY = "One day, a little girl named Lily found a needle in her room. She knew it was difficult to play with it. " * 6


def symbols(count: int, seed: int = 0) -> str:
    """Return a text of the quickstart's symbols, one token each."""
    rng = random.Random(seed)
    return "".join(rng.choice("0123456789abcdefABCDEF;?[]") for _ in range(count))


@pytest.fixture
def book(workdir, model):
    """book(text, model, **keys) returns a recipe on book.txt, like text.yaml."""

    def make(text: str = symbols(150), model: Path = model, **keys: Any) -> PerplexityRecipe:
        (workdir / "book.txt").write_text(text, encoding="utf-8")
        mapping = {
            "kind": "perplexity", "model": str(model), "output_dir": "out", "dtype": "float32", "text": "book.txt",
            "prompt_tokens": 12, "completion_tokens": 20,
        }  # fmt: skip
        keys["rollout"] = {"engine": "hf", **keys.get("rollout", {})}
        return make_recipe({**mapping, **keys}).expect(PerplexityRecipe)

    return make


def plain_losses(folder: Path, ids: list[int], prompt: int, length: int) -> list[float]:
    """Return the mean loss of each piece after its prompt, from transformers' own forward pass over the whole piece."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses = []
    for start in range(0, len(ids) - length + 1, length):
        piece = torch.tensor([ids[start : start + length]])
        with torch.no_grad():
            logits = model(input_ids=piece).logits[0, prompt - 1 : -1].double()
        losses.append(float(torch.nn.functional.cross_entropy(logits, piece[0, prompt:])))
    return losses


@pytest.mark.parametrize("name", ["random", "quickstart", "stories"])
@pytest.mark.parametrize(("prompt", "completion"), [(12, 20), (1, 31), (31, 1), (1, 1)])
@pytest.mark.few(4)
def test_a_full_cache_has_the_perplexity_of_a_plain_forward_pass(book, model, name, prompt, completion):
    """Control: if the prompt has one token more, the loss differs by more than 1e-3."""
    if name == "stories" and not (STORIES / "model.safetensors").exists():
        pytest.skip("the trained model stories260K is not here")
    folder = {"random": model, "quickstart": QUICKSTART, "stories": STORIES}[name]
    text = STORY if name == "stories" else symbols(150)
    recipe = book(text, folder, cache="full", prompt_tokens=prompt, completion_tokens=completion)
    (row,) = measure(recipe, progress=False)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    losses = plain_losses(folder, ids, prompt, prompt + completion)
    assert row.pieces == len(losses) == len(ids) // (prompt + completion) > 1
    assert row.nll == pytest.approx(statistics.mean(losses), abs=1e-5)
    assert row.standard_error == pytest.approx(statistics.stdev(losses) / len(losses) ** 0.5, abs=1e-5)
    assert row.perplexity == pytest.approx(math.exp(row.nll))
    assert row.retention == 1
    assert row.tokens == completion * len(losses)
    assert row.seconds > 0
    assert row.peak_entries == row.read_entries == prompt + completion - 1
    if completion > 1:  # control
        assert abs(row.nll - statistics.mean(plain_losses(folder, ids, prompt + 1, prompt + completion))) > 1e-3


def test_a_sweep_has_a_row_for_each_cache(book, workdir):
    """The full cache and a budget of 500 give equal losses, since a piece has only 32 tokens."""
    clustered = {"policy": "clustered", "page": 4, "window": 4, "open_pages": 1}
    sweep = {"policy": ["full", "streaming", clustered], "cache": {"budget": [8, 500]}}
    rows = measure(book(model=QUICKSTART, sweep=sweep), progress=False)
    assert [(row.policy, row.parameters.get("budget")) for row in rows] == [
        ("full", None), ("streaming", 8), ("streaming", 500), ("clustered", None),
    ]  # fmt: skip
    full, small, large, pages = rows
    assert large.nll == pytest.approx(full.nll, abs=1e-5)
    assert large.retention == 1
    assert min(abs(row.nll - full.nll) for row in (small, pages)) > 1e-3
    assert small.peak_entries == small.read_entries == 9
    assert small.retention < 1
    assert 0 < small.mean_peak_entries <= 9
    assert pages.read_entries < pages.peak_entries == full.peak_entries == 31
    content = json.loads((workdir / "out/perplexity.json").read_text())
    assert [row["nll"] for row in content["rows"]] == [row.nll for row in rows]
    assert content["rows"][1]["budget"] == 8
    assert content["format_version"] == 1
    assert "torch" in content["versions"]
    assert make_recipe(content["recipe"]) == book(model=QUICKSTART, sweep=sweep)


def test_results_do_not_depend_on_the_batch_and_pieces_keep_their_order(book):
    cache = {"policy": "h2o", "budget": 8}
    rows = [
        measure(book(cache=cache, rollout={"max_batch": batch}, **keys), progress=False)[0]
        for batch, keys in ((64, {}), (1, {}), (3, {"pieces": 2}), (64, {"pieces": 99}))
    ]
    assert rows[1].nll == pytest.approx(rows[0].nll, abs=1e-6)
    assert rows[3].nll == rows[0].nll
    assert [row.pieces for row in rows] == [4, 4, 2, 4]
    assert rows[2].nll != rows[0].nll
    assert measure(book(symbols(70), cache=cache), progress=False)[0].nll == pytest.approx(rows[2].nll, abs=1e-6)
    single_piece = measure(book(symbols(40), cache=cache), progress=False)[0]
    assert single_piece.pieces == 1
    assert single_piece.standard_error is None


def test_each_cache_has_one_engine_and_only_one_is_open(book, as_vllm):
    sweep = {"policy": ["full", "streaming"], "cache": {"budget": [8]}}
    expected = measure(book(sweep=sweep), progress=False)
    rows = measure(book(sweep=sweep, rollout={"engine": "auto"}), progress=False)
    assert as_vllm == ["full", "closed", "streaming", "closed"]
    assert [row.nll for row in rows] == [row.nll for row in expected]


def test_pieces_are_consecutive_parts_of_the_text(tmp_path):
    """100 tokens give 3 pieces of 32; the rest is left out. A text shorter than a piece is refused."""
    tokenizer, text = AutoTokenizer.from_pretrained(QUICKSTART), symbols(100)
    (tmp_path / "t.txt").write_text(text)
    pieces = read_pieces(str(tmp_path / "t.txt"), tokenizer, 32)
    assert [len(piece) for piece in pieces] == [32] * 3
    assert [token for piece in pieces for token in piece] == tokenizer(text)["input_ids"][:96]
    assert len(read_pieces(str(tmp_path / "t.txt"), tokenizer, 100)) == 1
    with pytest.raises(UserError, match="has 100 tokens, but a piece needs 101"):
        read_pieces(str(tmp_path / "t.txt"), tokenizer, 101)


def test_perplexity_prints_a_table_and_other_commands_read_its_results(book, workdir, capsys):
    book()
    words = ["perplexity", "text.yaml", "sweep={policy: [full, streaming], cache: {budget: [8]}}"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "4 pieces, 20 tokens decoded after 12" in out
    assert "streaming 8" in out
    assert "perplexity" in out
    assert out.endswith("out/perplexity.json\n")
    assert main(words) == 2
    assert "already holds perplexity.json" in capsys.readouterr().err
    assert main([*words, "--overwrite", "pieces=1"]) == 0
    assert "1 pieces, 20" in capsys.readouterr().out
    assert main(["plot", "out"]) == 0
    assert "nll a token" in capsys.readouterr().out
    assert main(["doctor", "text.yaml", "cache={policy: streaming, budget: 8}"]) == 0
    assert "streaming 8: 12 entries" in " ".join(capsys.readouterr().out.split())
