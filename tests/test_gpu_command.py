"""`python -m benchmarks.gpu` measures in stages, each in a process of its own. No stage stops the others, no measured
row is lost, and the report claims no number that was not measured.

The loop over the stages is tested with made-up stages, which take no time. The stages themselves are tested at small
sizes on a CPU (slow).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import random
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
import json, os, signal, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent

def describe(device, small, options):
    yield {"measured": {"machine": "made up", "torch": "0"}}
    yield {"topic": "driver", "finding": "1.2.3"}

def rows(name, count, seconds=0.0):
    def stage(device, small, options):
        for i in range(count):
            if not options.measured(i=i):
                time.sleep(seconds)
                with (HERE / "measured").open("a") as file:
                    file.write(f"{name} {i}\\n")
                yield {"i": i, "ms": 1.5 * i}
    return stage

fine, second, third = (rows(name, 3) for name in ("fine", "second", "third"))
slow_a, slow_b, slow_c = (rows(name, 4, 0.1) for name in ("slow_a", "slow_b", "slow_c"))

def raises(device, small, options):
    yield {"i": 0, "ms": 2.0}
    raise ValueError("the kernel has no image")

def hangs(device, small, options):
    yield {"i": 0, "ms": 2.0}
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (HERE / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)

def killed(device, small, options):
    os.kill(os.getpid(), signal.SIGKILL)
    yield {}

def garbage(device, small, options):
    yield ["a list", 1]

def silent(device, small, options):
    yield from ()

def prints(device, small, options):
    print("this is no row")
    yield {"i": 0, "ms": float("nan"), "s": 1}

def wordy(device, small, options):
    yield {"kernel": "flex", "finding": "it looks well", "exact": True}

def half(device, small, options):
    from benchmarks.gpu.worker import attempt
    yield attempt({"i": 0}, lambda: {"ms": 1.0})
    yield attempt({"i": 1}, lambda: {"ms": 1.0 / 0})
"""
RUN = """
import json, sys
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.stages import Stage
stages = [Stage(**{**stage, "needs": tuple(stage.get("needs", ()))}) for stage in json.loads(sys.argv[1])]
sys.exit(main(sys.argv[2:], stages, "made_up:describe"))
"""


def alive(pid: int) -> bool:
    """Return True if a process runs. A killed process that its parent has not waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Command:
    """The command with made-up stages, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "results.json"
        (folder / "made_up.py").write_text(MADE_UP)
        (folder / "run.py").write_text(RUN)

    def start(self, names: list[str], *words: str, stages: dict[str, Any] | None = None) -> subprocess.Popen[str]:
        """Start the command with the stages of these names. stages : name -> changed fields of a stage"""
        changes = stages or {}
        table = [
            {"name": n, "question": f"Is {n} run?", "function": f"made_up:{n}", "limit": 0.5, **changes.get(n, {})}
            for n in names
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
        return self(names, "--device", "cpu", "--out", str(self.out), *words, **given)

    def resume(self, names: list[str], *words: str, **given: Any) -> str:
        return self(names, "--resume", str(self.out), *words, **given)

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
        (line,) = (line for line in self.report.splitlines() if line.startswith(f"| [{name}]"))
        return line.split("|")[2].strip()

    def measured(self) -> Counter[str]:
        """Return how often each row was measured, over all calls."""
        return Counter((self.folder / "measured").read_text().splitlines())


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path)


# ---- failures -------------------------------------------------------------------------------------------------------

BROKEN = {
    "raises": "ValueError: the kernel has no image",
    "killed": "killed by SIGKILL",
    "garbage": "wrote 1 lines that are no rows",
    "silent": "ended without a row",
}


def test_a_broken_stage_is_reported_in_one_line_and_the_others_run(command: Command) -> None:
    command.new(["raises", "killed", "fine", "garbage", "silent", "second"])
    assert command.statuses == {**dict.fromkeys(BROKEN, "failed"), "fine": "done", "second": "done"}
    for name, reason in BROKEN.items():
        assert reason in command.result(name)
        assert "\n" not in command.stages[name]["reason"]
    assert command.result("fine") == command.result("second") == "done"
    assert [row["i"] for row in command.stages["fine"]["rows"]] == [0, 1, 2]


def test_the_last_lines_of_a_failure_are_in_the_report(command: Command) -> None:
    command.new(["raises", "fine"])
    assert 'raise ValueError("the kernel has no image")' in command.report
    assert str(ROOT) not in command.report
    assert command.stages["fine"]["stderr"] == []


def test_a_stage_that_hangs_is_ended_with_all_its_processes(command: Command) -> None:
    """The stage `hangs` starts a child process and sleeps. At its time limit both processes are killed, its first row
    is kept, and the next stage runs.
    """
    command.new(["hangs", "fine"], stages={"hangs": {"limit": 0.02}})
    pids = [int(pid) for pid in (command.folder / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
    assert alive(os.getpid())
    assert command.statuses == {"hangs": "cut", "fine": "done"}
    assert "cut after 1 rows: reached its limit of 1 s" in command.result("hangs")


def test_a_failed_row_does_not_stop_the_other_rows(command: Command) -> None:
    command.new(["half", "fine"])
    assert command.statuses == {"half": "done", "fine": "done"}
    assert command.result("half") == "done; 1 of 2 rows failed"
    assert "ZeroDivisionError" in command.report
    assert command.result("fine") == "done"


def test_printed_text_is_ignored_and_nan_is_written_as_valid_json(command: Command) -> None:
    command.new(["prints"])
    (row,) = command.stages["prints"]["rows"]
    assert (row["ms"], row["s"]) == ("nan", 1)
    assert "NaN" not in command.out.read_text()


def test_a_stage_that_measures_no_number_is_reported_as_not_run(command: Command) -> None:
    command.new(["wordy", "fine"])
    assert command.statuses["wordy"] == "done"
    assert command.result("wordy") == "not run: it gave no number"
    assert command.result("fine") == "done"


def test_only_stages_that_need_an_absent_library_are_left_out(command: Command) -> None:
    needs = {"fine": {"needs": ["no_such_library"]}, "second": {"needs": ["json"]}}
    command.new(["fine", "second"], stages=needs)
    assert command.result("fine") == "not run: no_such_library is not installed"
    assert command.result("second") == "done"
    assert not any(line.startswith("fine") for line in command.measured())


# ---- resuming -------------------------------------------------------------------------------------------------------


def test_a_command_killed_at_any_moment_can_be_resumed(command: Command) -> None:
    """The command is killed at six random moments and resumed. In the end every row is in the results once. Only a row
    that was being measured at a kill is measured twice.
    """
    names, generator = ["slow_a", "slow_b", "slow_c"], random.Random(0)
    kills = 0
    words = ["--device", "cpu", "--out", str(command.out)]
    for _ in range(6):
        process = command.start(names, *words)
        time.sleep(generator.uniform(0.3, 1.2))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if command.out.exists():
            assert json.loads(command.out.read_text())["format"] == 1
            words = ["--resume", str(command.out)]
    assert kills > 0
    command(names, *words)
    assert command.statuses == dict.fromkeys(names, "done")
    for name in names:
        assert sorted(row["i"] for row in command.stages[name]["rows"]) == [0, 1, 2, 3]
    counts = command.measured()
    assert len(counts) == 12
    assert counts.total() <= 12 + kills
    calls = {row["call"] for stage in command.stages.values() for row in stage["rows"]}
    assert len(calls) > 1
    assert max(calls) < len(json.loads(command.out.read_text())["calls"])


def test_a_killed_command_leaves_no_stage_running(command: Command) -> None:
    """After the command is killed, the process of its stage ends by itself."""
    process = command.start(["hangs"], "--device", "cpu", "--out", str(command.out))
    pids_file = command.folder / "pids"
    for _ in range(200):
        if pids_file.exists() and pids_file.read_text():
            break
        time.sleep(0.05)
    worker, sleeper = (int(pid) for pid in pids_file.read_text().split())
    assert alive(worker)
    process.kill()
    process.wait()
    for _ in range(100):
        if not alive(worker):
            break
        time.sleep(0.05)
    assert not alive(worker)
    os.kill(sleeper, signal.SIGKILL)


def test_a_stage_that_failed_twice_runs_again_only_if_it_is_named(command: Command) -> None:
    names = ["fine", "raises"]
    command.new(names)
    for failures in (1, 2, 2):
        assert command.stages["raises"]["failures"] == failures
        output = command.resume(names)
    assert "raises: not run again, it failed 2 times" in output
    command.resume(names, "--only", "raises")
    assert command.stages["raises"]["failures"] == 3
    assert set(command.measured().values()) == {1}


def test_a_stage_that_is_done_runs_again_only_if_it_is_named(command: Command) -> None:
    command.new(["fine", "second"])
    command.resume(["fine", "second"], "--only", "fine")
    assert command.measured() == {
        f"{name} {i}": 2 - (name == "second") for name in ("fine", "second") for i in range(3)
    }
    assert [row["call"] for row in command.stages["fine"]["rows"]] == [1, 1, 1]
    assert [row["call"] for row in command.stages["second"]["rows"]] == [0, 0, 0]


@pytest.mark.slow
def test_an_interrupted_stage_runs_last_when_the_command_resumes(command: Command) -> None:
    names = ["hangs", "fine"]
    command.new(names, stages={"hangs": {"limit": 0.02}})
    output = command.resume([*names, "second"], stages={"hangs": {"limit": 0.02}})
    assert output.index("second: done") < output.index("hangs: cut")


def test_stages_that_exceed_the_given_minutes_are_left_out(command: Command) -> None:
    with_minutes = {"fine": {"minutes": 5.0}, "second": {"minutes": 0.1}}
    command.new(["fine", "second"], "--minutes", "2", stages=with_minutes)
    assert command.statuses == {"fine": "not run", "second": "done"}
    assert "left out" in command.result("fine")
    assert "needs about 5" in command.result("fine")
    command.resume(["fine", "second"], "--minutes", "6", stages=with_minutes)
    assert command.statuses == {"fine": "done", "second": "done"}


def test_the_report_can_be_written_again_without_a_run(command: Command) -> None:
    command.new(["fine", "raises"])
    report = command.report
    command.out.with_suffix(".md").unlink()
    command(["fine", "raises"], "--report", str(command.out))
    assert command.report == report
    assert set(command.measured().values()) == {1}


def test_the_report_lists_each_stage_and_each_machine(command: Command) -> None:
    command.new(["fine"])
    command.resume(["fine", "second", "third"], "--only", "second")
    for name in ("fine", "second", "third"):
        assert f"\n## {name}\n" in command.report
    assert "Not run: left out by --only." in command.report
    assert "## Call 0: machine and versions" in command.report
    assert "## Call 1: machine and versions" in command.report
    assert "| driver | 1.2.3 |" in command.report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "results.json"], "exists; continue it with --resume"),
        (["--resume", "absent.json"], "cannot be read"),
        (["--resume", "results.json", "--device", "cuda"], "has full sizes on cpu"),
        (["--resume", "results.json", "--small"], "has full sizes on cpu"),
        (["--resume", "results.json", "--only", "absent"], "invalid choice"),
        (["--out", "other.json", "--trace", "absent"], "is not a folder"),
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
    """The functions are looked up in the sources, because importing those of vLLM takes long. All stages together are
    planned to take at most 40 minutes.
    """
    stages = gpu("stages").STAGES
    assert len({stage.name for stage in stages}) == len(stages) > 15
    for stage in stages:
        module, _, function = stage.function.partition(":")
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text()
        assert f"\ndef {function}(device: str, small: bool, options: Options) -> Iterator[Row]:" in source
        assert 0 < stage.minutes <= stage.limit <= 8
        assert stage.question.endswith("?")
    assert sum(stage.minutes for stage in stages if not stage.needs) <= 40


def test_full_and_small_sizes_differ_in_every_field(gpu: Callable[[str], Any]) -> None:
    full, small = gpu("shapes").FULL, gpu("shapes").SMALL
    for field in dataclasses.fields(full):
        assert getattr(full, field.name) != getattr(small, field.name)
    assert {16384, 32768} <= set(full.lengths)
    assert (full.heads, full.budget) == ((28, 4, 128), 2048)


@pytest.mark.slow
def test_skipped_tests_do_not_count_as_passed(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    """A stage runs a file of four tests, which pass, fail, skip, and have a broken fixture. Its rows give these
    outcomes with their reasons. If all tests skip, the stage counts as not run.
    """
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_passes(): pass\n"
        "def test_fails(): assert 1 == 2, 'not exact'\n"
        "@pytest.mark.skip(reason='needs a GPU')\n"
        "def test_skips(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError('no driver')\n"
        "def test_is_not_set_up(broken): pass\n"
    )
    run_tests, worker = gpu("tests").run_tests, gpu("worker")
    rows = {row["test"].partition("::")[2]: row for row in run_tests([str(file)], worker.Options())}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {
        "test_passes": "passed", "test_fails": "failed", "test_skips": "skipped", "test_is_not_set_up": "error"
    }  # fmt: skip
    assert "not exact" in rows["test_fails"]["reason"]
    assert rows["test_skips"]["reason"] == "needs a GPU"
    (shown, *broken) = gpu("comparisons").COMPARISONS["tests_kernels"].shown(list(rows.values()))
    assert (shown["passed"], shown["failed"], shown["error"], shown["skipped"]) == (1, 1, 1, 1)
    assert len(broken) == 2
    file.write_text("import pytest\n@pytest.mark.skip(reason='needs a GPU')\ndef test_skips(): pass\n")
    with pytest.raises(worker.NotRunError, match="all 1 tests skip: needs a GPU"):
        list(run_tests([str(file)], worker.Options()))


def test_compared_times_give_the_ratio_to_the_reference(gpu: Callable[[str], Any]) -> None:
    """A function that is ten times as fast as the reference has a ratio above 2; one that fails has its error as a
    row."""

    def fails() -> None:
        raise RuntimeError("out of memory")

    works = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.002), "fails": fails}
    rows = gpu("timing").compared(works, "cpu", 3, reference="slow")
    assert rows["fast"]["times faster than slow"] > 2
    assert rows["slow"]["times faster than slow"] == 1
    assert rows["slow"]["ms"] >= 20
    assert rows["fails"] == {"failure": "RuntimeError: out of memory"}


def test_a_shorter_text_gets_the_beginning_of_a_longer_trace(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    """`evictions` records one trace at the longest length, and cuts it for shorter texts. The first 256 tokens have the
    same evictions as a trace that is recorded for 256 tokens. Control: without the cut they do not, because later
    queries evict more of them.
    """
    evictions, options = gpu("evictions"), gpu("worker").Options(folder=tmp_path)
    beginning, origin = evictions.evictions("cpu", True, options, 256)
    assert "synthetic" in origin
    evictions._record("cpu", True, 256, tmp_path / "alone.safetensors")
    alone = evictions.EvictionTrace.load(tmp_path / "alone.safetensors").evict_at[0]
    assert (alone < evictions.NEVER).any()
    assert beginning.equal(alone)
    longer, _ = evictions.evictions("cpu", True, options, 384)
    assert not longer[:, :256].equal(alone)


def test_evictions_come_from_a_folder_of_traces_if_one_is_given(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    evictions, worker = gpu("evictions"), gpu("worker")
    options = worker.Options(folder=tmp_path, trace=tmp_path / "traces")
    (tmp_path / "traces").mkdir()
    trace = evictions.EvictionTrace.from_events(3, 2, 300, evictions.torch.tensor([[1, 0, 5, 40], [0, 1, 6, 50]]))
    trace.save(tmp_path / "traces/mine.safetensors")
    evict_at, origin = evictions.evictions("cpu", True, options, 200)
    assert origin == "mine.safetensors"
    assert (evict_at < evictions.NEVER).nonzero().tolist() == [[0, 5]]
    with pytest.raises(worker.NotRunError, match="its longest trace has 300"):
        evictions.evictions("cpu", True, options, 301)


ABSENT = """
import importlib.util, sys
ABSENT = {"vllm", "trl", "deepspeed", "datasets", "math_verify", "wandb", "shtab", "kvpress"}
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
plain = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in ABSENT else plain(name, *more)
"""
ENDS = {"tests_kernels": "not run", "tests_vllm": "not run"}  # the other stages are done


def small_run(folder: Path, *words: str) -> dict[str, Any]:
    """Run all stages in their small form, and return their results."""
    (folder / "sitecustomize.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    arguments = ["--device", "cpu", "--small", "--out", str(folder / "results.json"), *words]
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "results.json").read_text())


def check_done(name: str, stage: dict[str, Any]) -> None:
    """Check that a stage is done, without a failed row and with a measured number."""
    assert stage["status"] == "done", (name, stage["reason"], stage["stderr"])
    assert [row for row in stage["rows"] if "failure" in row] == [], name
    numbers = [value for row in stage["rows"] for key, value in row.items() if key != "call"]
    assert any(isinstance(value, float) for value in numbers), name


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_in_its_small_form(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    content = small_run(tmp_path)
    assert content["stages"].keys() == {stage.name for stage in gpu("stages").STAGES}
    for name, stage in content["stages"].items():
        if name in ENDS:
            assert stage["status"] == ENDS[name]
            assert "tests skip" in stage["reason"]
        else:
            check_done(name, stage)
    assert sum(stage["seconds"] for stage in content["stages"].values()) < 600
    parity = content["stages"]["attention_parity"]["rows"]
    assert {row["kernel"] for row in parity} == {"flex_sorted", "flex", "gather"}
    assert all(row["exact"] for row in parity)
    assert all(row["same tokens"] == 1 for row in content["stages"]["vllm_modes"]["rows"])
    assert all(row["different numbers"] == 0 for row in content["stages"]["running_topk"]["rows"])
    assert (tmp_path / "results.md").read_text().count("not run: all") == len(ENDS)


@pytest.mark.slow
def test_stages_that_do_not_need_vllm_or_trl_run_without_them(gpu: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    stages = small_run(tmp_path)["stages"]
    needing = {stage.name for stage in gpu("stages").STAGES if {"vllm", "trl"} & {*stage.needs}}
    assert 0 < len(needing) < len(stages)
    for name, stage in stages.items():
        if name in needing:
            assert stage["status"] == "not run"
            assert "not installed" in stage["reason"]
        elif name not in ENDS:
            check_done(name, stage)


@pytest.mark.slow
def test_the_speed_of_decoding_is_given_only_if_all_requests_run_at_once(
    gpu: Callable[[str], Any], tmp_path: Path
) -> None:
    """Four requests of 160 tokens, 5 blocks each. All of them run at once, whether their prompts of 60 tokens are read
    in one step or in several; in several, they also end at different steps. In the control, with 14 blocks in the pool,
    some are preempted.
    """
    pytest.importorskip("vllm")
    stage, shapes = gpu("vllm"), gpu("shapes")
    config = shapes.config_of(shapes.SMALL.small_model, max_position_embeddings=512)
    speeds = []
    for options in ({"max_num_batched_tokens": 256}, {"max_num_batched_tokens": 64}, {"blocks": 14}):
        engine = stage._engine(config, {"policy": "full"}, "cpu", tmp_path, 4, 160, **options)
        try:
            row = stage._timed(engine, 4, 60, 160)
        finally:
            engine.close()
        speeds.append(row.get("decoding tokens/s"))
        assert (row["peak blocks"] == 20) == (row["preempted"] == 0) == ("blocks" not in options)
    assert [speed is not None for speed in speeds] == [True, True, False]


def test_stages_are_generators_of_documented_rows(gpu: Callable[[str], Any]) -> None:
    for name in ("kernels", "tests", "contexts"):
        module = gpu(name)
        functions = [stage.function for stage in gpu("stages").STAGES if stage.function.startswith(module.__name__)]
        for function in functions:
            stage = getattr(module, function.partition(":")[2])
            assert inspect.isgeneratorfunction(stage)
            assert (inspect.getdoc(stage) or "").startswith("Yield")
