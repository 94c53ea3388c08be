"""`python -m benchmarks.gpu` measures in stages, each in a process of its own. No stage stops the others, no measured
row is lost, and the report claims no number that was not measured.

The loop over the stages is tested with made-up stages, which take no time. The stages themselves are tested at small
sizes on a CPU (slow).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MADE_UP = """
import os, signal, subprocess, time
from pathlib import Path
from benchmarks.gpu.stages import attempt
from sparse_rl.temporary import temporary_folder

HERE = Path(__file__).parents[2]

def describe(options):
    yield {"driver": "1.2.3"}

def rows(name, count, seconds=0.0):
    def stage(options):
        for i in range(count):
            if not options.measured(i=i):
                time.sleep(seconds)
                with (HERE / "measured").open("a") as file:
                    file.write(f"{name} {i}\\n")
                yield {"i": i, "ms": 1.5 * i}
    return stage

fine, second, third = (rows(name, 3) for name in ("fine", "second", "third"))
slow_a, slow_b, slow_c = (rows(name, 4, 0.1) for name in ("slow_a", "slow_b", "slow_c"))

def raises(options):
    yield {"i": 0, "ms": 2.0}
    raise ValueError("the kernel has no image")

def hangs(options):
    yield {"i": 0, "ms": 2.0}
    child = subprocess.Popen(["sleep", "1000"])
    (Path(temporary_folder()) / "weights").write_text("a few GB")
    (HERE / "folder").write_text(temporary_folder())
    (HERE / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)

def killed(options):
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}

def exits(options):
    os._exit(3)
    yield {}

def silent(options):
    yield from ()

def half(options):
    yield attempt({"i": 0}, lambda: {"ms": 1.0})
    yield attempt({"i": 1}, lambda: {"ms": 1.0 / 0})
"""
RUN = """
import json, sys
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.stages import Stage
if __name__ == "__main__":
    stages = [Stage(**{**stage, "needs": tuple(stage.get("needs", ()))}) for stage in json.loads(sys.argv[1])]
    main(sys.argv[2:], stages, "made_up describe")
"""

NEW, RESUME = ["--device", "cpu", "--out", "results.json"], ["--resume", "results.json"]


def alive(pid: int, within: float = 0.0) -> bool:
    """Return True if a process runs after some seconds, or until it ends. A killed process may wait for its parent."""
    end = time.monotonic() + within
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z" or time.monotonic() >= end:
            return state != "Z"
        time.sleep(0.05)


class Command:
    """The command with made-up stages, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "results.json"
        module = folder / "benchmarks/gpu/made_up.py"  # Python joins the two folders `benchmarks`
        module.parent.mkdir(parents=True)
        module.write_text(MADE_UP)
        (folder / "run.py").write_text(RUN)

    def start(self, names: list[str], *words: str, stages: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        """Start the command with the stages of these names. stages : name -> changed fields of a stage"""
        changes = stages or {}
        table = [
            {"name": n, "place": f"made_up {n}", "minutes": 0.1, "limit": 0.5, **changes.get(n, {})} for n in names
        ]
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}"}
        command = [sys.executable, str(self.folder / "run.py"), json.dumps(table), *words]
        return subprocess.Popen(
            command, env=environment, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def __call__(self, names: list[str], *words: str, status: int = 0, **given: Any) -> str:
        """Run the command to its end, and return its output."""
        process = self.start(names, *words, **given)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == status, output
        return output

    def new(self, names: list[str], *words: str, **given: Any) -> str:
        return self(names, *NEW, *words, **given)

    def resume(self, names: list[str], *words: str, **given: Any) -> str:
        return self(names, *RESUME, *words, **given)

    @property
    def stages(self) -> dict[str, Any]:
        return json.loads(self.out.read_text())["stages"]

    @property
    def statuses(self) -> dict[str, str]:
        return {name: stage["status"] for name, stage in self.stages.items()}

    @property
    def report(self) -> str:
        return self.out.with_suffix(".md").read_text()

    def result(self, name: str) -> str:
        """Return the cell of a stage in the summary of the report."""
        (line,) = (line for line in self.report.splitlines() if line.startswith(f"| {name} |"))
        return line.split("|")[2].strip()

    def measured(self) -> Counter[str]:
        """Return how often each row was measured, over all calls."""
        return Counter((self.folder / "measured").read_text().splitlines())


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


BROKEN = {
    "raises": "ValueError: the kernel has no image",
    "killed": "was killed by SIGKILL",
    "exits": "ended with exit status 3",
    "silent": "ended without a row",
}


def test_a_broken_stage_is_reported_in_one_line_and_the_others_run(command: Command) -> None:
    command.new(["raises", "killed", "exits", "fine", "silent", "half", "second"])
    assert command.statuses == {**dict.fromkeys(BROKEN, "failed"), **dict.fromkeys(["fine", "half", "second"], "done")}
    for name, reason in BROKEN.items():
        assert reason in command.result(name)
    assert command.result("fine") == command.result("second") == "done"
    assert command.result("half") == "done; 1 of 2 rows failed"
    assert "ZeroDivisionError" in command.report
    assert 'raise ValueError("the kernel has no image")' in command.report
    assert str(ROOT) not in command.report
    assert "| driver | 1.2.3 |" in command.report


def test_a_stage_that_hangs_is_ended_with_all_its_processes(command: Command) -> None:
    """The stage `hangs` starts a child process and sleeps. At its time limit both processes are killed, its temporary
    files are removed, its first row is kept, and the next stage runs.
    """
    command.new(["hangs", "fine"], stages={"hangs": {"limit": 0.1}})
    pids = [int(pid) for pid in (command.folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(alive(pid, within=5) for pid in pids)
    assert alive(os.getpid())
    assert not Path((command.folder / "folder").read_text()).exists()
    assert command.statuses == {"hangs": "cut", "fine": "done"}
    assert "cut after 1 rows: reached its limit of 6 s" in command.result("hangs")


def test_stages_without_their_library_or_time_are_left_out(command: Command) -> None:
    """A stage is also left out if less than half of its minutes are left; otherwise it may be cut."""
    needs, minutes = {"needs": ["no_such_library"]}, {"minutes": 5.0}
    changes = {"fine": needs, "second": minutes, "third": {"needs": ["json"], "minutes": 3.0}}
    command.new(["fine", "second", "third"], "--minutes", "2", stages=changes)
    assert command.result("fine") == "not run: not installed: no_such_library"
    assert "left out: it needs about 5 minutes" in command.result("second")
    assert command.result("third") == "done"
    assert command.measured().keys() == {f"third {i}" for i in range(3)}
    command.resume(["fine", "second", "third"], "--minutes", "6", stages=changes)
    assert command.statuses == {"fine": "not run", "second": "done", "third": "done"}
    assert set(command.measured().values()) == {1}


def test_a_command_killed_at_any_moment_can_be_resumed(command: Command) -> None:
    """The command is killed a random moment after its first, second or third row, and resumed. In the end every row
    is in the results once. Only a row that was being measured at a kill is measured twice.
    """
    names, generator = ["slow_a", "slow_b", "slow_c"], random.Random(0)
    (command.folder / "measured").touch()
    kills = 0
    words = NEW
    for _ in range(5):
        process = command.start(names, *words)
        enough = command.measured().total() + generator.randint(1, 3)
        while command.measured().total() < enough and process.poll() is None:
            time.sleep(0.01)
        time.sleep(generator.uniform(0.0, 0.1))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if command.out.exists():
            words = RESUME
    assert kills > 2
    command(names, *words)
    assert command.statuses == dict.fromkeys(names, "done")
    for name in names:
        assert sorted(row["i"] for row in command.stages[name]["rows"]) == [0, 1, 2, 3]
    counts = command.measured()
    assert len(counts) == 12
    assert counts.total() <= 12 + kills
    calls = {row["call"] for stage in command.stages.values() for row in stage["rows"]}
    assert max(calls) < len(json.loads(command.out.read_text())["calls"])


def test_a_killed_command_leaves_no_stage_running(command: Command) -> None:
    """After the command is killed, the process of its stage ends by itself."""
    process = command.start(["hangs"], *NEW)
    pids = command.folder / "pids"
    for _ in range(400):
        if pids.exists() and pids.read_text():
            break
        time.sleep(0.05)
    worker, sleeper = (int(pid) for pid in pids.read_text().split())
    assert alive(worker)
    process.kill()
    process.wait()
    assert not alive(worker, within=5)
    os.kill(sleeper, signal.SIGKILL)


def test_a_resumed_command_runs_what_is_missing_and_last_what_failed(command: Command) -> None:
    """A stage that is done runs again only if it is named."""
    names = ["raises", "fine", "second"]
    command.new(names[:2])
    output = command.resume(names)
    assert output.index("second: done") < output.index("raises: failed")
    assert command.measured() == dict.fromkeys((f"{name} {i}" for name in names[1:] for i in range(3)), 1)
    command.resume(names, "--only", "fine")
    assert [row["call"] for row in command.stages["fine"]["rows"]] == [2, 2, 2]
    assert [row["call"] for row in command.stages["second"]["rows"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "results.json"], "exists; continue it with --resume"),
        (["--resume", "absent.json"], "cannot be read"),
        (["--resume", "results.json", "--only", "absent"], "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.few(2)
def test_wrong_arguments_do_not_change_the_results_file(command: Command, words: list[str], message: str) -> None:
    command.new(["fine"])
    before = command.out.read_text()
    assert message in command(["fine"], *words, status=2)
    assert command.out.read_text() == before


# ---- the stages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """gpu(name) -> the module benchmarks.gpu.NAME"""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.gpu.{name}")


def test_the_table_of_stages_names_functions_that_exist(gpu: Callable[[str], Any]) -> None:
    """The functions are looked up in the sources, because importing those of vLLM takes long. A stage fits into a call
    of ten minutes, except the last one, which takes no time from others.
    """
    stages = gpu("stages").STAGES
    assert len({stage.name for stage in stages}) == len(stages) > 15
    for stage in stages:
        module, function, *words = stage.place.split()
        source = (ROOT / "benchmarks/gpu" / module).with_suffix(".py").read_text()
        parameters = ", ".join(["options: Options", *[r"\w+: str"] * len(words)])
        assert re.search(rf'\ndef {function}\({parameters}\) -> Iterator\[Row\]:\n    """Yield', source)
        assert 0 < stage.minutes <= stage.limit
        assert stage.limit <= 8 or stage == stages[-1]
    assert sum(stage.minutes for stage in stages if not stage.needs) <= 20


DESCRIBED = 0.3  # minutes until the first stage starts
ENGINE, STARTED = 20 / 60, 0.5  # minutes of an engine and its test; of pytest and the tests of waits


def test_each_documented_command_for_some_stages_fits_into_its_minutes(gpu: Callable[[str], Any]) -> None:
    """Those for the first minutes need no library but torch, Triton and transformers, and not a minute less."""
    stages, first = {stage.name: stage for stage in gpu("stages").STAGES}, list[str]()
    text = "\n".join(file.read_text() for file in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
    for names, minutes in {*re.findall(r"benchmarks\.gpu\b.* --only ([\w. ]+) --minutes (\d+)", text)}:
        named = [stages[name] for name in names.split()]
        needed = DESCRIBED + sum(stage.minutes for stage in named)
        assert needed <= int(minutes), names
        if not any(stage.needs for stage in named):
            assert needed > int(minutes) - 1, names
            first += names.split()
    assert {*first} == {"attention_parity", "attention_speed", "compaction", "running_topk", "redundancy", "sampler"}


def test_the_first_tests_on_a_gpu_are_few_and_of_all_kinds(
    gpu: Callable[[str], Any], request: pytest.FixtureRequest
) -> None:
    """Those of vLLM fit into their minutes, by the engines that they start; all tests together would need more than the
    limit. Every test has a case among the first, except a large one and one of an option without effect.
    """
    files = [*(ROOT / "tests/gpu").glob("test_*.py")]
    collected = [pytest.Module.from_parent(request.session, path=file).collect() for file in files]
    cases = [case for of_file in collected for case in of_file if not case.get_closest_marker("slow")]
    first = {case: mark.args[0] for case in cases if (mark := case.get_closest_marker("first"))}
    assert {case.originalname for case in cases} - {case.originalname for case in first} == {
        "test_the_kernels_are_exact_at_16k", "test_without_sleep_mode_a_sleep_has_no_effect"
    }  # fmt: skip
    (stage,) = (stage for stage in gpu("stages").STAGES if stage.name == "tests_vllm")
    assert STARTED + ENGINE * sum(first.values()) <= stage.minutes
    assert ENGINE * len([case for case in cases if case.path.name == "test_vllm_cuda.py"]) > stage.limit


@pytest.mark.slow
def test_skipped_tests_do_not_count_as_passed(
    gpu: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage runs a file of four tests, which pass, fail, skip, and have a broken fixture. If all tests skip, the
    stage counts as failed.
    """
    file = tmp_path / "test_some.py"
    skipped = "@pytest.mark.skip(reason='needs a GPU')\ndef test_skips(): pass\n"
    file.write_text(
        f"import pytest\ndef test_passes(): pass\ndef test_fails(): assert 1 == 2, 'not exact'\n{skipped}"
        "@pytest.fixture\ndef broken(): raise OSError('no driver')\ndef test_is_not_set_up(broken): pass\n"
    )
    stages = gpu("stages")
    monkeypatch.setitem(stages.TESTS, "some", [str(file)])
    rows = list(stages.run_tests(stages.Options("cpu", True), "some"))
    outcomes = {row["test"].partition("::")[2]: row["outcome"] for row in rows if "outcome" in row}
    assert outcomes == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_is_not_set_up": "error"
    }  # fmt: skip
    reasons = {row["test"].partition("::")[2]: row["reason"] for row in rows if "reason" in row}
    assert "not exact" in reasons["test_fails"]
    assert "no driver" in reasons["test_is_not_set_up"]
    file.write_text(f"import pytest\n{skipped}")
    with pytest.raises(RuntimeError, match="all tests skip: needs a GPU"):
        list(stages.run_tests(stages.Options("cpu", True), "some"))


def test_compared_times_give_the_ratio_to_the_reference(gpu: Callable[[str], Any]) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    works = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.002), "fails": fails}
    rows = gpu("kernels").compared(works, 3, reference="slow")
    assert rows["fast"]["times faster than slow"] > 2
    assert rows["slow"]["times faster than slow"] == 1
    assert rows["slow"]["ms"] >= 20
    assert rows["fails"] == {"failure": "RuntimeError: out of memory"}


ABSENT = """
import importlib.util, sys
ABSENT = {"vllm", "trl", "deepspeed", "datasets", "math_verify", "wandb", "shtab", "kvpress", "pandas", "matplotlib",
    "accelerate", "peft", "tensorboard"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in ABSENT else plain(name, *more)
"""


@pytest.mark.slow
@pytest.mark.parametrize("absent", ["", ABSENT], ids=["installed", "torch, Triton and transformers alone"])
def test_every_stage_runs_on_a_cpu_in_its_small_form(gpu: Callable[[str], Any], tmp_path: Path, absent: str) -> None:
    """Without vLLM and TRL the stages that need them are left out, the first stages run in a call of their own, and
    the others in a second call. The tests of tests/gpu skip.
    """
    (tmp_path / "sitecustomize.py").write_text(absent)
    environment, file = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}, tmp_path / "results.json"
    new = ["--device", "cpu", "--small", "--out", file]
    only = ["--only", "attention_parity", "attention_speed", "--minutes", "9"]
    for words in [[*new, *only], ["--resume", file]] if absent else [new]:
        command = [sys.executable, "-m", "benchmarks.gpu", *words]
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
    content = json.loads(file.read_text())
    stages = content["stages"]
    assert all(call["torch"] for call in content["calls"])
    needing = {stage.name for stage in gpu("stages").STAGES if {*stage.needs} - {"pytest"}}
    for name, stage in stages.items():
        if absent and name in needing:
            assert stage["reason"].startswith("not installed")
        elif name.startswith("tests_"):
            assert "tests skip" in stage["reason"]
        else:
            assert stage["status"] == "done", (name, stage["reason"], stage["log"])
            assert not [row for row in stage["rows"] if "failure" in row], name
            assert any(isinstance(value, float | dict) for row in stage["rows"] for value in row.values()), name
            assert {row["call"] for row in stage["rows"]} == {int(bool(absent) and name not in only)}, name
    assert all(row["exact"] for row in stages["attention_parity"]["rows"])
