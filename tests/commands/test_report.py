"""`sparse-rl report`: one page about results, without network. Sections without data are absent; wrong use is
one line."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch

from sparse_rl.analysis.report import Section, html, packed, page
from sparse_rl.commands.main import main
from sparse_rl.commands.report import policy_sentence
from sparse_rl.trace import NEVER, EvictionTrace


class Outline(HTMLParser):
    """The ids of a page's sections, and everything that the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "section":
            self.sections.append(str(values["id"]))
        self.loaded += [str(values[name]) for name in ("src", "href") if values.get(name)]


def write_run(folder: Path, seed: int, gap: float, reward: float) -> None:
    folder.mkdir(parents=True)
    mismatched = "full" if gap > 1 else "replay"
    lines = [
        {"step": step, "reward": reward * step / 4, "replay/gap_mean": gap / 9, "replay/gap_max": gap, "step_time": 2.0,
         "ratio/p5": 0.9, "ratio/mean": 1.0, "ratio/p95": 1.1, "ratio/max": 3.0, "ratio/clipped": 0.25,
         "cache/retention": 0.5, "cache/bytes_held": 2e6, "cache/bytes_full": 8e6, "completions/mean_length": 90.0}
        for step in range(1, 5)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(
        f"kind: grpo\nmodel: m\nseed: {seed}\noutput_dir: {folder}\ntrain_attention: {mismatched}\n"
        "cache: {policy: streaming, budget: 40}\n"
    )


def test_a_page_has_the_sections_that_have_data_and_loads_nothing(tmp_path, capsys):
    """The sections follow from the files. Two seeds of one training are one line. Every picture is part of the file."""
    for seed in (0, 1):
        write_run(tmp_path / f"seed{seed}" / "sparse", seed, 1e-6, 0.9)
        write_run(tmp_path / f"seed{seed}" / "mismatched", seed, 21.0, 0.5)
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    outline = Outline(text)
    assert outline.sections == ["learning", "replay", "lengths", "runs"]
    assert all(link.startswith(("data:", "#")) for link in outline.loaded)
    assert "seed0/mismatched, seed1/mismatched: the trainer computed other probabilities than the sampler" in text
    assert "sparse, " not in re.search(r"<p class=\"note\">The gap is.*?</p>", text)[0]
    assert "2.0 MB of 8.0 MB" in text
    assert "A band spans the seeds of a line" in text


def test_runs_are_compared_within_their_kind(tmp_path):
    for name in ("low", "high", "student"):
        write_run(tmp_path / name, 0, 1e-6, 0.9)
    file = tmp_path / "student" / "recipe.yaml"
    file.write_text(file.read_text().replace("kind: grpo", "kind: distillation"))
    (tmp_path / "high" / "recipe.yaml").write_text((tmp_path / "low" / "recipe.yaml").read_text() + "lr: 2\n")
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3>", text[text.index('id="runs"') :]) == [
        "Runs of kind grpo", "Where the recipes differ", "Runs of kind distillation"
    ]  # fmt: skip
    (table_of_keys,) = re.findall(r'aria-label="differences of the recipes".*?</table>', text, re.S)
    assert re.findall(r"<th scope.*?>(.*?)</th>", table_of_keys) == ["key", "high", "low"]
    assert "seed" not in table_of_keys


def test_results_that_cannot_be_compared_are_listed(tmp_path):
    (tmp_path / "bench.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "Measured: bench. There is no training or evaluation to compare." in text[: text.index("<nav")]


def test_what_truncated_sampling_trained_is_said(tmp_path):
    for name, more in (("top_p", {"support/mass": 0.975}), ("whole", {})):
        write_run(tmp_path / name, 0, 1e-6, 0.9)
        file = tmp_path / name / "metrics.jsonl"
        lines = [json.dumps({**json.loads(line), **more}) + "\n" for line in file.read_text().splitlines()]
        file.write_text("".join(lines))
    assert main(["report", str(tmp_path)]) == 0
    labels = re.findall(r"(\w+): top-p, top-k or min-p kept (\S+) of", (tmp_path / "report.html").read_text())
    assert labels == [("top_p", "97.5%")]


def test_trainings_stand_beside_the_model_before_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, gap in (("sparse", 1e-6), ("mismatched", 21.0)):
        write_run(Path("runs") / name, 0, gap, 0.9)
    accuracies = {"m": (0.25, 0.98), "runs/sparse/model": (0.9, 0.75), "runs/mismatched/model": (0.5, 0.25)}
    rows = [
        {"model": model, "task": "sums", "policy": policy, "parameters": {}, "problems": 8, "samples": 1, "excluded": 0,
         "accuracy": accuracy, "standard_error": 0.01, "further_accuracy": {}, "pass_at_k": {}, "pass_at_k_error": {},
         "retention": 1.0, "retention_correct": 1.0, "length": 9.0, "truncated": 0.0, "forced": 0.0, "peak_entries": 9,
         "read_entries": 9, "tokens_per_second": 1.0, "contexts": None, "budget": None}
        for model, both in accuracies.items() for policy, accuracy in zip(("streaming", "full"), both, strict=True)
    ]  # fmt: skip
    Path("runs/eval.json").write_text(json.dumps({"rows": rows}))
    assert main(["report", "runs"]) == 0
    text = Path("runs/report.html").read_text()
    finding = "Training sparse (grpo: RL-Sparse, the best of 2 trainings under this cache) raised"
    assert text.index(finding) < text.index("<nav")
    assert re.findall(r"<span>(.*?)</span><b>(.*?)</b>", text) == [
        ("before training", "25.0%"), ("mismatched", "50.0%"), ("sparse", "90.0%")
    ]  # fmt: skip
    (table_of_keys,) = re.findall(r'aria-label="differences of the recipes".*?</table>', text, re.S)
    assert re.findall(r"<tr><td.*?>(.*?)</td>", table_of_keys) == ["train_attention"]


def test_the_policy_of_rollouts_is_said_in_words():
    policy = {"policy": "streaming", "budget": 40, "sinks": 1, "period": 8}
    words = policy_sentence({"model": "m", "policy": json.dumps(policy)})
    assert words.startswith("Sampled by m, streaming, budget 40. ")
    assert words.endswith("Settings: sinks 1, period 8.")
    assert policy_sentence({"model": "m"}) == "Sampled by m, unnamed policy."


def test_codes_of_a_completion_give_back_its_evictions():
    generator = torch.Generator().manual_seed(0)
    for length, layers in ((12, 2), (700, 3)):
        later = torch.randint(1, length, (layers, 2, length), generator=generator)
        never = torch.rand(layers, 2, length, generator=generator) < 0.4
        trace = EvictionTrace.recorded((torch.arange(length) + later).masked_fill(never, NEVER))
        data = packed(trace, ["a"] * length, 3)
        planes = np.frombuffer(zlib.decompress(base64.b64decode(data["codes"])), dtype=np.uint8).astype(np.int64)
        count = layers * 2 * length
        assert len(planes) == count * (2 if data["wide"] else 1)
        codes = planes[:count] + (planes[count:] << 8 if data["wide"] else 0)
        times = [NEVER, *data["times"]]
        assert [times[code] for code in codes] == trace.evict_at.flatten().tolist()
    assert data["wide"], "more than 255 eviction times need two bytes"


def test_layers_with_a_sliding_window_are_left_out():
    trace = EvictionTrace.dense(2, 2, 9).beside_windows([0, 4, 0])
    assert packed(trace, ["a"] * 9, 3)["layers"] == [0, 2]


def test_text_is_escaped():
    """Tokens, titles and cells may hold any text, also the end of a script."""
    nasty = "</script><script>alert(1)</script>&\"'"
    data = packed(EvictionTrace.dense(1, 1, 3), [nasty] * 3, 1)
    text = page(
        nasty, nasty, [Section("a", nasty, html.table([nasty], [[nasty]], nasty) + html.sample(nasty, data, True))]
    )
    assert "<script>alert" not in text
    (content,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(content)["tokens"] == [nasty] * 3


def test_completions_and_analyses_come_from_rollouts(tmp_path):
    cache = "cache={policy: gkv, budget: 24, window: 4, period: 4}"
    command = ["rollout", "quickstart/grpo", "model=quickstart/model", cache, "max_completion_length=40"]
    assert (
        main(
            [*command, "rollout.engine=hf", "num_generations=2", "--problems", "2", "--out", str(tmp_path / "rollouts")]
        )
        == 0
    )
    assert main(["report", str(tmp_path), "--completions", "2", "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert Outline(text).sections == ["analyses", "completions"]
    assert text.count('<details class="sample"') == 2
    assert text.count('<details class="sample" open') == 1


def test_damaged_results_are_left_out_with_a_word(tmp_path, capsys):
    write_run(tmp_path / "run", 0, 1e-6, 0.9)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "eval.json").write_text('{"rows": [{"model": 1}]}')
    assert main(["report", str(tmp_path)]) == 0
    assert "eval.json is left out" in capsys.readouterr().err
    assert Outline((tmp_path / "report.html").read_text()).sections == ["learning", "replay", "lengths", "runs"]
