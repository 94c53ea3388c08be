"""The command line: its output, its exit statuses, and one clear error line for every mistake a user can make."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from errno import EFBIG, ENOSPC
from functools import partial

import pytest
import torch
import transformers
from learned import learned_policy, with_scorers
from processes import python, without_launch

from sparse_rl.analysis.results import run_labels
from sparse_rl.commands import console
from sparse_rl.commands.console import Session, guarded, training_line
from sparse_rl.commands.main import COMMANDS, main, parse
from sparse_rl.errors import NotFiniteError, NotWrittenError, StoppedError, UserError
from sparse_rl.models.directory import save_policy, write_scorers
from sparse_rl.models.load import load_plain_model
from sparse_rl.policies import Entries, make_policy
from sparse_rl.recipe import load_recipe
from sparse_rl.trace import EvictionTrace, TraceError, load_traces, save_traces
from trainer.arguments import refusals
from trainer.grpo.metrics import ReplayGapError

AT_ITS_LIMIT = "a file has reached its size limit (ulimit -f)"
OUT_OF_MEMORY = (
    "sparse-rl: out of GPU memory: `sparse-rl doctor RECIPE` lists the memory of each part; lower rollout.max_batch or "
    "the batch size"
)


def error_of(capsys, *arguments, status=2):
    """Return the one-line error of a failing command."""
    assert main(list(arguments)) == status
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1, err
    assert err.startswith("sparse-rl: error: ")
    return err


def metrics(folder, values, name="reward"):
    """Write the metrics of a run, with these values of one metric, and return its folder."""
    folder.mkdir(parents=True)
    lines = [{"step": i + 1, name: v, "replay/gap_mean": 1e-7, "replay/gap_max": 1e-6} for i, v in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: neither a file nor a shipped recipe"),
        (["train", "grpo.yaml", "learning_rat=1"], "learning_rat: unknown key; did you mean learning_rate?"),
        (["train", "grpo.yaml", "max_steps=many"], "max_steps: expected a whole number"),
        (["train", "grpo.yaml", "learning_rate"], "'learning_rate' is not of the form key=value"),
        (["train", "grpo.yaml", "--epochs=2"], "unrecognised argument '--epochs=2'"),
        (["inspect", "a.safetensors", "b=1"], "unrecognised argument 'b=1'"),
        (["train", "grpo.yaml", "cache.policy=gvk"], "did you mean 'gkv'?"),
        (["train", "grpo.yaml", "cache.budget=4", "cache.sinks=4"], "budget: 4 must exceed"),
        (["train", "grpo.yaml", "num_generations=3"], "groups must be whole"),
        (["train", "grpo.yaml", "model=nobody"], "nobody is not a model directory"),
        (["train", "grpo.yaml", "model=gpt2"], "of type 'gpt2', which cannot be replayed: the supported families are"),
        (["train", "grpo.yaml", "data={path: nothing.jsonl}"], "data.path: no such file: nothing.jsonl"),
        (["train", "grpo.yaml", "data={path: empty.jsonl}"], "data.path: empty.jsonl has no rows"),
        (["train", "grpo.yaml", "rewards=[maths]"], "unknown reward 'maths': did you mean 'math'?"),
        (["train", "grpo.yaml", "report_to=wandb_"], "report_to"),
        (["train", "grpo.yaml", "--resume"], "holds no complete checkpoint to resume from"),
        (["train", "grpo.yaml", "--resume", "elsewhere"], "elsewhere is not a complete checkpoint"),
        (["train", "grpo.yaml", "data.synthetic.size=1"], "holds 1 prompts, but one generation takes 2"),
        (["train", "eval.yaml"], "a recipe of kind eval is not trained"),
        (["train", "distill.yaml", "--dry-run", "keep=maths"], "keep: unknown reward 'maths': did you mean 'math'?"),
        (["train", "distill.yaml", "--dry-run", "top_k=8", "teacher_cache=no"], "no holds no teacher cache"),
        (["teacher", "distill.yaml", "top_k=8", "teacher_cache=sft.yaml"], "sft.yaml cannot be written"),
        (["teacher", "sft.yaml"], "a recipe of kind sft has no teacher"),
        (["rollout", "sft.yaml"], "a recipe of kind sft is not supported here"),
        (["rollout", "grpo.yaml", "--problems", "0"], "expected a whole number >= 1"),
        (["rollout", "grpo.yaml", "model=weightless"], "weightless has no weights"),
        (
            ["train", "grpo.yaml", "--dry-run", "output_dir=empty.jsonl/run"],
            "/empty.jsonl (it is not a folder); name another",
        ),
        (["train", "grpo.yaml", "--dry-run", "output_dir=empty.jsonl"], "output_dir: empty.jsonl cannot be written"),
        (["train", "."], ".: neither a file nor a shipped recipe"),
        (["train", "x" * 300], "no file can have this name"),
        (
            ["train", "grpo.yaml", "--dry-run", "lora.target_modules=nothing"],
            "matches no layer of the model, which has down",
        ),
        (["plot", "runs", "--out", "."], "--out: . is not a picture file"),
        (["plot", "runs", "--out", "curve"], "--out: curve is not a picture file"),
        (["serve", "weightless", "--kv-cache-gb", "1e308"], "expected a number of at most 1,000,000, got"),
        (["inspect", "x" * 300], "no file can have the name"),
        (["eval", "grpo.yaml"], "it needs kind: eval"),
        (["eval", "eval.yaml", "model=nobody"], "nobody is not a model directory"),
        (["eval", "eval.yaml", "accuracy=maths"], "accuracy: unknown reward 'maths'"),
        (
            ["eval", "eval.yaml", "sweep.cache.budget=[0]"],
            "sweep: streaming: budget: expected a mapping or a whole number >= 1",
        ),
        (["inspect", "nothing.safetensors"], "nothing.safetensors does not exist"),
        (["inspect", "torn.safetensors"], "torn.safetensors cannot be read"),
        (["plot", "."], "is not the directory of a run"),
        (["doctor", "grpo.yaml", "model=nobody"], "nobody is not a model directory"),
        (["dance"], "invalid choice: 'dance'"),
        (["trian", "grpo.yaml"], "invalid choice: 'trian' (did you mean 'train'?)"),
        (["plot", ".", "--metrc", "loss"], "unrecognised argument '--metrc' of plot; did you mean --metric?"),
        (["train", "grpo.yaml", "--budget", "64"], "'--budget' of train; did you mean cache.budget=VALUE?"),
        (["train", "grpo.yaml", "--cache.budget=64"], "did you mean cache.budget=64?"),
        (["train", "grpo.yaml", "--learning-rate", "1e-5"], "did you mean learning_rate=VALUE?"),
        (["train", "grpo.yaml", "--bugdet"], "did you mean cache.budget=VALUE?"),
        (["train", "grpo.ymal"], "neither a file nor a shipped recipe; did you mean grpo.yaml?"),
        (["eval", "evla.yml"], "did you mean eval.yaml?"),
        (["eval", "sft.yaml"], "a recipe of kind sft is not evaluated; it needs kind: eval; sparse-rl train runs this"),
        (["train", "eval.yaml"], "sparse-rl eval runs this recipe"),
        (["keys", "grpo", "cache.budgets"], "(did you mean 'cache.budget'?)"),
        (["train", "grpo.yaml", "--dry-run", "output_dir=/proc/x"], "output_dir: /proc/x cannot be written: /proc"),
        (["train", "grpo.yaml", "output_dir=/dev/null"], "output_dir: /dev/null cannot be written"),
        (["eval", "eval.yaml", "--dry-run", "output_dir=/proc/x"], "output_dir: /proc/x cannot be written: /proc"),
        (["rollout", "grpo.yaml", "--dry-run", "--out", "/dev/null"], "--out: /dev/null cannot be written"),
        (["train", "grpo.yaml", "--dry-run", "output_dir=blocked"], "blocked/checkpoint-2 is not a folder that can be"),
        (
            ["eval", "eval.yaml", "--dry-run", "--overwrite", "output_dir=blocked"],
            "blocked/eval.json is not a file that",
        ),
        (["bench", "bench.yaml", "length=[]", "contexts=null"], "length: name at least one length, or set contexts"),
        (["bench", "bench.yaml", "length=[10]"], "length: 10 leaves no token to sample after a prompt of 10 tokens"),
        (["bench", "bench.yaml", "batch=[2, 2]"], "batch: a number is named twice"),
        (["bench", "bench.yaml", "random_weights=true", "shape={num_hidden_layers: 0}"], "num_hidden_layers is 0"),
        (["bench", "bench.yaml", "batch=[]"], "batch: name at least one batch size"),
        (["bench", "bench.yaml", "batch=[0]"], "batch[0]: expected a whole number >= 1"),
        (["bench", "bench.yaml", "shape={num_hidden_layers: 3}"], "shape: only a model with random weights can"),
        (["bench", "bench.yaml", "random_weights=true", "shape={layers: 3}"], "shape.layers: unknown key"),
        (["bench", "bench.yaml", "random_weights=true", "shape={num_hidden_layers: many}"], "shape: "),
        (["bench", "bench.yaml", "random_weights=true", "shape={num_attention_heads: 3}"], "shape"),
        (["bench", "bench.yaml", "length=[24, 100000]", "contexts=null"], "exceed the model's context length of"),
        (
            ["bench", "bench.yaml", "contexts.length=[30, 200000]"],
            "contexts.length: 200,000 exceeds the model's context length",
        ),
        (["bench", "bench.yaml", "contexts.compactions=[{first: 30}]"], "contexts.length: the context has 30 tokens"),
        (["bench", "bench.yaml", "plain_vllm=true"], "plain_vllm: unknown key"),
        (["bench", "bench.yaml", "rollout.tensor_parallel=2"], "rollout.tensor_parallel: "),
        (["bench", "bench.yaml", "cache.policy=gvk"], "unknown cache policy 'gvk'"),
        (["bench", "bench.yaml", "minutes=15"], "minutes: unknown key"),
        (["bench", "bench.yaml", "no_such_key=1"], "no_such_key: unknown key"),
        (["bench", "bench.yaml", "model=nowhere"], "model: "),
        (["bench", "bench.yaml", "output_dir=bench.yaml"], "output_dir: "),
        (["perplexity", "text.yaml", "prompt_tokens=400"], "text: book.txt has 150 tokens, but a piece needs 420"),
        (["perplexity", "text.yaml", "text=empty.jsonl"], "text: empty.jsonl has 0 tokens"),
        (["perplexity", "text.yaml", "text=nothing.txt"], "text: nothing.txt cannot be read: No such file"),
        (["perplexity", "text.yaml", "text=."], "text: . cannot be read: Is a directory"),
        (["perplexity", "text.yaml", "text=latin.txt"], "text: latin.txt cannot be read: 'utf-8' codec"),
        (["perplexity", "text.yaml", "prompt_tokens=0"], "prompt_tokens: expected a whole number >= 1"),
        (["perplexity", "text.yaml", "cache=gvk"], "unknown cache policy 'gvk'"),
        (["perplexity", "text.yaml", "rollout.max_model_len=31"], "must hold a prompt and a completion, at least 32"),
        (["perplexity", "text.yaml", "model=."], ". is not a model directory"),
        (["perplexity", "text.yaml", "samples=3"], "samples: unknown key"),
        (["perplexity", "eval.yaml"], "a recipe of kind eval has no text to decode; it needs kind: perplexity"),
        (["eval", "text.yaml"], "a recipe of kind perplexity is not evaluated"),
        (["train", "text.yaml"], "a recipe of kind perplexity is not trained; use sparse-rl perplexity"),
        (["rollout", "text.yaml"], "a recipe of kind perplexity samples nothing; use sparse-rl perplexity"),
        (["keys", "gropo"], "unknown 'gropo' (did you mean 'grpo'?); one of grpo, distill,"),
        (["keys", "grpo", "leraning_rate"], "leraning_rate: unknown name (did you mean 'learning_rate'?)"),
        (["keys", "grpo", "rollout.enigne"], "(did you mean 'rollout.engine'?)"),
        (["keys", "grpo", "cache.budget"], "it is a key of cache policies: sparse-rl keys policies cache.budget"),
        (["keys", "sft", "zzz"], "zzz: unknown name; sparse-rl keys sft lists all names"),
        (["keys", "policies", "gvk"], "(did you mean 'gkv'?)"),
        (["keys", "policies", "budgt"], "(did you mean 'budget'?)"),
        (["keys", "rewards", "maths"], "(did you mean 'math'?)"),
        (["keys", "policies", "--json-schema"], "--json-schema: needs one kind of recipe, or none for all"),
        (["keys", "grpo", "seed", "--json-schema"], "--json-schema: needs one kind of recipe, or none for all recipes"),
        (["keys", "grpo", "seed", "more"], "unrecognised argument 'more' of keys"),
        (["report", "nowhere"], "nowhere does not exist"),
        (["report", "weightless"], "weightless holds no results: there is none of metrics.jsonl, rollouts.json"),
        (["report", "empty.jsonl"], "empty.jsonl is a file; name its folder, ."),
        (["report", ".", "--out", "page.pdf"], "--out: page.pdf is not an HTML file"),
    ],
)
def test_each_user_error_gives_one_line_and_status_2(workdir, model, capsys, arguments, message):
    for name, kind in (("nobody", None), ("gpt2", "gpt2")):
        (workdir / name).mkdir()
        if kind:
            (workdir / name / "config.json").write_text(json.dumps({"model_type": kind}))
    (workdir / "blocked/eval.json").mkdir(parents=True)
    (workdir / "blocked/checkpoint-2").touch()
    (workdir / "empty.jsonl").write_text("")
    (workdir / "torn.safetensors").write_text("")
    (workdir / "book.txt").write_text("1" * 150)
    (workdir / "latin.txt").write_bytes("café".encode("latin-1"))
    (workdir / "weightless").mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (workdir / "weightless" / file.name).write_text(file.read_text())
    capsys.readouterr()
    assert message in error_of(capsys, *arguments)


def test_only_rank_0_of_several_processes_prints_the_error(workdir, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "0")
    assert "neither a file" in error_of(capsys, "train", "nowhere.yaml")


def test_errors_are_found_before_processes_start(workdir, capsys, monkeypatch):
    """A process of the launch (RANK is set) trains instead of starting further processes."""
    started = []
    monkeypatch.setattr("trainer.launch.launch", lambda *given: started.append(given) or 0)
    arguments = ["train", "grpo.yaml", "launch.processes=2"]
    assert "no such file" in error_of(capsys, *arguments, "data={path: nothing.jsonl}")
    assert not started
    assert main(arguments) == 0
    config, words = started[0]
    assert config.processes == 2
    assert words == arguments
    monkeypatch.setenv("RANK", "0")  # a process of the launch runs the training
    monkeypatch.setattr("sparse_rl.commands.train.run_training", lambda prepared, show: "model")
    assert main(arguments) == 0
    assert len(started) == 1


@pytest.mark.parametrize(("processes", "expects_warning"), [(2, False), (4, True)])
def test_more_processes_than_gpus_give_a_warning(processes, expects_warning, workdir, capsys, monkeypatch):
    monkeypatch.setattr("trainer.launch.launch", lambda *given: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    words = [f"launch.processes={processes}", "per_device_train_batch_size=1", "gradient_accumulation_steps=4"]
    assert main(["train", "grpo.yaml", *words]) == 0
    line = f"sparse-rl: warning: launch.processes: {processes} processes on 2 GPUs; lower processes"
    assert (line in capsys.readouterr().err.splitlines()) == expects_warning


def test_errors_of_wandb_do_not_stop_training(workdir, capsys, monkeypatch):
    """If W&B cannot read its settings file, a training says so and goes on without W&B."""
    (workdir / "wandb").mkdir()
    (workdir / "wandb" / "settings").write_text("[default]\nbase_url = https://a%b.example\n")
    monkeypatch.setenv("WANDB_DIR", "")
    assert main(["train", "sft.yaml", "report_to=[wandb]"]) == 0
    assert "this run is not logged to Weights & Biases, which cannot start: the login" in capsys.readouterr().err
    assert (workdir / "out" / "metrics.jsonl").exists()
    assert not list((workdir / "out").glob("wandb"))


def test_errors_leave_their_traceback_in_the_run_directory(workdir, capsys):
    error_of(capsys, "train", "grpo.yaml", "data={path: nothing.jsonl}")
    log = (workdir / "out" / "error.log").read_text()
    assert "no such file: nothing.jsonl" in log
    assert "Traceback" in log
    error_of(capsys, "train", "grpo.yaml", "--dry-run", "rewards=[maths]")
    assert (workdir / "out" / "error.log").read_text() == log  # a dry run writes nothing
    assert main(["train", "sft.yaml"]) == 0
    assert not (workdir / "out" / "error.log").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no\nsuch thing", "key"), 2, "sparse-rl: error: key: no such thing"),
        (TraceError("bad trace"), 2, "sparse-rl: error: bad trace"),
        (ReplayGapError("too far"), 1, "sparse-rl: stopped: too far"),
        (StoppedError("no way on"), 1, "sparse-rl: stopped: no way on"),
        (NotFiniteError("a NaN score"), 2, "sparse-rl: error: a NaN score"),
        (NotWrittenError("it", "why"), 1, "sparse-rl: stopped: it could not be written: why"),
        (OSError(ENOSPC, "no room"), 1, "sparse-rl: stopped: the disk is full: [Errno 28] no room"),
        (torch.OutOfMemoryError("CUDA"), 1, OUT_OF_MEMORY),
        (ValueError("not ours"), 1, "sparse-rl: unexpected ValueError: not ours (traceback in "),
        (FloatingPointError("a NaN score"), 1, "sparse-rl: unexpected FloatingPointError: a NaN score (traceback in "),
        (KeyError("x"), 1, "sparse-rl: unexpected KeyError: 'x' (traceback in "),
        (SystemExit(0), 1, "sparse-rl: unexpected SystemExit: 0 (traceback in "),  # it would end Python silently
        (SystemExit("no"), 1, "sparse-rl: unexpected SystemExit: no (traceback in "),
        (GeneratorExit(), 1, "sparse-rl: unexpected GeneratorExit:  (traceback in "),
        (OSError(EFBIG, "it", "a"), 1, f"sparse-rl: stopped: {AT_ITS_LIMIT}: [Errno {EFBIG}] it: 'a'"),
        (KeyboardInterrupt(), 130, "sparse-rl: interrupted"),
    ],
)
def test_every_kind_of_error_has_its_status_and_one_line(tmp_path, capsys, error, status, message):
    """Except for an interrupt, the traceback is written to error.log."""
    session = Session()
    session.folder = tmp_path / "run"

    def work():
        raise error

    assert "\n" not in str(error)
    assert guarded(work, session) == status
    assert capsys.readouterr().err.splitlines() in ([message], [f"{message}{session.folder / 'error.log'})"])
    if status != 130:
        assert type(error).__name__ in (session.folder / "error.log").read_text()


def test_a_nan_score_of_a_policy_gives_one_line(tmp_path, capsys):
    """Our code raises it; the same error class, raised by other code (see the test above), counts as unexpected."""
    session = Session()
    session.folder = tmp_path
    zeros, lengths = torch.zeros(1, 1, 9, 2), torch.tensor([9])
    entries = Entries(
        zeros + float("nan"), zeros, torch.arange(9).view(1, 1, 9), lengths, lengths, zeros[:, :, :2], 1.0, {}, [4]
    )
    policy = make_policy("morphkv", budget=4, window=2, period=2)
    assert guarded(lambda: policy.compact(0, entries).check_finite(0, policy.name) or 0, session) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sparse-rl: error: morphkv: a NaN score in layer 0")
    assert "Traceback" in (tmp_path / "error.log").read_text()


def test_an_unexpected_error_without_a_run_directory_shows_its_traceback(capsys):
    assert guarded(lambda: 1 // 0, Session()) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("sparse-rl: unexpected ZeroDivisionError")


def test_an_interrupt_wrapped_in_a_library_error_counts_as_an_interrupt(capsys):
    def interrupted_worker(cause):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("a worker went away") from cause

    assert guarded(lambda: interrupted_worker(None), Session()) == 130
    # with an explicit other cause, it is an unexpected error
    assert guarded(lambda: interrupted_worker(OSError("pipe")), Session()) == 1
    assert capsys.readouterr().err.splitlines()[0] == "sparse-rl: interrupted"


def is_reported_as_a_user_error(work):
    """Return True if the error is reported as a user's mistake (one line, status 2), and False if it is reported as a
    fault of the program, with a traceback."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        status = guarded(work, Session())
    lines = err.getvalue().splitlines()
    assert ("Traceback" in err.getvalue()) == (status == 1), lines
    assert status == 1 or len(lines) == 1, lines
    assert lines[-1].startswith("sparse-rl: error: " if status == 2 else "sparse-rl: unexpected ")
    return status == 2


def test_only_our_own_errors_are_reported_as_user_errors():
    """A library's ValueError is our fault, except in a block with options that the user chose (`refusals`)."""
    from rollout import SamplingConfig, make_engine
    from sparse_rl.kernels import running_topk

    assert is_reported_as_a_user_error(lambda: make_policy("nothing"))
    assert is_reported_as_a_user_error(lambda: SamplingConfig(0))
    assert is_reported_as_a_user_error(lambda: make_engine("no", model=None))
    assert is_reported_as_a_user_error(lambda: running_topk(torch.zeros(1, 1, 4), sinks=0, window=0, k=1))
    assert not is_reported_as_a_user_error(lambda: json.loads("{"))
    assert not is_reported_as_a_user_error(lambda: int("x"))
    assert not is_reported_as_a_user_error(lambda: dict(zip([1], [], strict=True)))
    assert not is_reported_as_a_user_error(lambda: b"\xff".decode())
    refused = partial(transformers.TrainingArguments, output_dir="out", logging_strategy="never")
    assert not is_reported_as_a_user_error(refused)
    assert is_reported_as_a_user_error(refusals()(refused))  # in a block in which the user chose the options


def test_a_message_is_printed_once_per_launch(tmp_path, capsys, monkeypatch):
    session = Session()
    session.folder = tmp_path
    messages = []
    for rank, port, text in ((1, "1", "a"), (0, "1", "a"), (2, "1", "b"), (1, "2", "a")):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("MASTER_PORT", port)
        console._report(ReplayGapError(text), session)
        messages.append(capsys.readouterr().err.strip())
    assert messages == ["sparse-rl: stopped: a", "", "sparse-rl: stopped: b", "sparse-rl: stopped: a"]


def test_a_failed_write_is_reported_once_per_launch(tmp_path, capsys, monkeypatch):
    """If no log can be written, each process reports the failure. checkpoint-1 is not mistaken for checkpoint-10."""
    session = Session()
    session.folder = tmp_path
    monkeypatch.setenv("MASTER_PORT", "1")
    messages = []
    for rank, what, why in ((1, "checkpoint-10", "a"), (0, "checkpoint-10", "b"), (2, "checkpoint-1", "a")):
        monkeypatch.setenv("RANK", str(rank))
        console._report(NotWrittenError(what, why), session)
        messages.append(capsys.readouterr().err.strip().removeprefix("sparse-rl: stopped: "))
    assert messages == ["checkpoint-10 could not be written: a", "", "checkpoint-1 could not be written: a"]
    session.folder = tmp_path / "error.log"  # a file instead of a folder, so writes into it fail
    for error, is_reported_again in ((NotWrittenError("it", "a"), True), (ReplayGapError("a"), False)):
        console._report(error, session)
        assert bool(capsys.readouterr().err) == is_reported_again


@pytest.mark.parametrize(
    ("words", "resume", "overrides"),
    [
        (["a=1", "b=2"], None, ["a=1", "b=2"]),
        (["--resume"], "newest", []),
        (["--resume", "some/dir", "a=1"], "some/dir", ["a=1"]),
        (["--resume", "a=1"], "newest", ["a=1"]),
        (["a=1", "--resume", "some/dir", "b=2"], "some/dir", ["a=1", "b=2"]),
        (["a=1", "--dry-run", "b=2"], None, ["a=1", "b=2"]),
    ],
)
def test_overrides_may_stand_anywhere_among_the_arguments(words, resume, overrides):
    options = parse(["train", "recipe.yaml", *words])
    assert (options.resume, options.overrides) == (resume, overrides)


def test_a_dry_run_prints_the_resolved_settings_and_skipped_checks(workdir, capsys):
    assert main(["train", "grpo.yaml", "--dry-run", "log_completions=true", "top_p=0.9"]) == 0  # the first is TRL's
    out, err = capsys.readouterr()
    assert "2 prompts × 2 samples a generation, 4 completions a step, 1 steps" in out
    assert "streaming(budget=16" in out
    assert "boxed × 1" in out
    assert "not checked" in out
    assert "warning" not in err
    assert not (workdir / "out").exists()
    assert main(["train", "sft.yaml", "--dry-run"]) == 0
    assert "8 rows" in capsys.readouterr().out


def test_eval_and_rollout_run_under_a_learned_policy(workdir, model, capsys):
    policy = learned_policy("delayed", 12, window=4)
    shutil.copytree(model, workdir / "learned")
    write_scorers(workdir / "learned", with_scorers(load_plain_model(model), policy).state_dict())
    save_policy(workdir / "learned", policy)
    assert main(["eval", "eval.yaml", "model=learned", "sweep={}", "rollout.progress=false"]) == 0
    assert "kvpop" in capsys.readouterr().out
    assert main(["eval", "eval.yaml", "sweep={}", "cache={policy: kvpop, budget: 300}", "--overwrite"]) == 2
    assert "has no scorers, which kvpop needs;" in capsys.readouterr().err
    block = "cache={policy: kvpop, budget: 12, sinks: 2, window: 4, scorer: {name: mlstm, chunk: 16}}"
    words = ["rollout", "grpo.yaml", "model=learned", block, "--problems", "3", "--out", "sampled"]
    assert main([*words, "rollout.progress=false"]) == 0
    line = json.loads((workdir / "sampled" / "completions.jsonl").read_text().splitlines()[0])
    assert len(line["prompt_ids"]) + len(line["completion_ids"]) == len(
        load_traces(workdir / "sampled" / "traces-00000.safetensors")[0]
    )


def test_inspect_and_plot_read_the_traces_that_rollout_writes(workdir, capsys):
    assert main(["rollout", "grpo.yaml", "--problems", "3", "rollout.progress=false"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rollouts: hf engine\n6 completions, ")
    traces = str(workdir / "out" / "rollouts" / "traces-00000.safetensors")
    assert main(["inspect", traces]) == 0
    out = capsys.readouterr().out
    assert "6 traces, 2 layers × 2 kv heads" in out
    assert '"policy": "streaming"' in out
    assert "head 1" in out
    assert main(["inspect", traces, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["traces"] == 6
    assert len(report["kept_per_head"]) == 2
    assert report["fingerprint"]["model"].startswith("qwen3")
    assert main(["plot", traces, "--out", "density.png"]) == 0
    assert (workdir / "density.png").stat().st_size > 5000


def test_inspect_summarises_a_large_trace(tmp_path, capsys):
    """The mean over the heads of every third layer, instead of every head."""
    save_traces(tmp_path / "t.safetensors", [EvictionTrace.dense(40, 20, 30)], {})
    assert main(["inspect", str(tmp_path / "t.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "mean" in out
    assert "head 0" not in out
    assert "every 3 layers of 40" in out
    assert len(out.splitlines()) < 40


def test_eval_prints_a_table(workdir, capsys):
    assert main(["eval", "eval.yaml", "rollout.progress=false"]) == 0
    out = capsys.readouterr().out
    assert "streaming 16" in out
    assert "full" in out
    assert "pass@2" in out
    rows = json.loads((workdir / "out" / "eval.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["streaming", "full"]


def test_plot_draws_the_curves_of_runs(tmp_path, capsys):
    first, second = metrics(tmp_path / "a" / "run", [0.1, 0.4, 0.3]), metrics(tmp_path / "b" / "run", [0.2])
    assert main(["plot", str(first), str(second)]) == 0
    drawn = capsys.readouterr().out.split()
    assert drawn == [str(first / "plots" / f"{name}_with_b_run.png") for name in ("learning", "gap")]
    assert main(["plot", str(first), "--out", str(tmp_path / "x.svg")]) == 0
    svg = (tmp_path / "x.svg").read_text()
    assert "<svg" in svg
    assert (tmp_path / "x_gap.svg").exists()
    assert "cannot be written" in error_of(capsys, "plot", str(first), "--out", str(tmp_path / "x.nothing"))
    assert main(["plot", str(metrics(tmp_path / "c", [3.0, 2.0], "loss"))]) == 0
    assert "no reward and no loss" in error_of(capsys, "plot", str(metrics(tmp_path / "d", [1.0], "other")))


def test_run_labels_are_right(tmp_path):
    assert list(run_labels([tmp_path / "a" / "x", tmp_path / "b" / "x"])) == ["a/x", "b/x"]
    assert list(run_labels([tmp_path / "a", tmp_path / "b"])) == ["a", "b"]


def test_trackio_is_used_only_if_installed(workdir, capsys, monkeypatch):
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    monkeypatch.setitem(sys.modules, "trackio", None)  # not installed, even if this machine has it
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "report_to: trackio is not installed; pip install trackio" in error_of(
        capsys, "train", "sft.yaml", "--dry-run", "report_to=[trackio]"
    )
    monkeypatch.undo()
    assert load_recipe(workdir / "sft.yaml", ["report_to=[trackio]"]).training.report_to == ["trackio"]
    assert {"wandb", "tensorboard", "trackio"} <= INTEGRATION_TO_CALLBACK.keys()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["doc"], ["doctor"]),
        (["keys", "gr"], ["grpo"]),
        (["train", "mine"], ["mine.yaml"]),
        (["train", "mine.yaml", "--dry"], ["--dry-run"]),
        (["plot", "--o"], ["--out"]),
    ],
)
def test_a_shell_completes_commands_recipes_files_and_options(workdir, capsys, words, offered):
    assert main(["--print-completion", "bash"]) == 0
    (workdir / "mine.yaml").write_text("")
    script = (
        capsys.readouterr().out
        + f"""
        COMP_WORDS=(sparse-rl {" ".join(words)}); COMP_CWORD={len(words)}
        _shtab_sparse_rl sparse-rl "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    )
    process = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=workdir)
    assert sorted(process.stdout.split()) == offered
    assert process.stderr == ""


def test_doctor_prints_versions_and_the_memory_of_a_recipe(workdir, capsys):
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    assert main(["doctor", "grpo.yaml"]) == 0
    out = capsys.readouterr().out
    assert "102,848 parameters" in out
    assert "fits" in out
    assert "streaming 16: 20 entries" in out
    assert "host memory (1 process, no GPU): fits" in out
    assert main(["doctor", "eval.yaml"]) == 0


@pytest.mark.parametrize(("gpu", "size"), [("80", "80.0 GB"), ("0.5", "500.0 MB"), ("h200", "150.1 GB")])
def test_doctor_plans_for_a_gpu_that_is_not_here(gpu, size, workdir, capsys):
    """Of the machine itself, nothing is compared: neither its memory nor its attention kernels."""
    assert main(["doctor", "grpo.yaml", "rollout={engine: auto}", "--gpu", gpu, "data.max_prompt_tokens=24"]) == 0
    out = capsys.readouterr().out
    assert f"of {size}" in out
    assert "vllm: KV pool" in out
    assert "outside PyTorch" in out
    assert ("does not fit" in out) == (gpu == "0.5")
    assert "host memory" not in out
    assert "attention kernel" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "grpo.yaml", "--gpu", "x9"], "argument --gpu: expected a number > 0"),
        (["doctor", "--gpu", "80"], "name one"),
    ],
)
def test_doctor_refuses_a_gpu_without_a_size_or_a_recipe(words, message, workdir, capsys):
    assert message in error_of(capsys, *words)


def test_a_training_log_is_printed_as_one_readable_line():
    logs = {"loss": 0.01, "reward": 0.5, "replay/gap_max": 2e-7, "cache/retention": 0.352, "grad_norm": 3.0}
    assert training_line(3, 40, logs) == "step 3/40  reward 0.500  grad norm 3  gap max 2.0e-07  kept 35%"
    assert training_line(3, 40, {"eval_reward": 0.25, "eval_loss": -1e-9}) == "step 3/40  held out  reward 0.250"
    assert training_line(3, 40, {"reward": None, "grad_norm": 0.0}) == "step 3/40  reward none  grad norm 0"
    assert training_line(3, 40, {"loss": 0.01, "grad_norm": 3.0}) == "step 3/40  loss 0.0100"
    assert training_line(3, 40, {"grad_norm": 3.0}) is None
    assert training_line(40, 40, {"train_runtime": 12.3, "train_loss": 0.1}) == "40 steps in 12 s"


def run(workdir, *arguments):
    """Run the command in a new process."""
    return python("-m", "sparse_rl.cli", *arguments, cwd=workdir, path=[workdir])


def test_in_a_real_process_a_missing_recipe_gives_one_line_and_status_2(workdir):
    process = run(workdir, "train", "nowhere.yaml")
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert process.stdout == ""


REWARD = "def fair(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n"
RAISES = "def unfair(completions, **_):\n    raise KeyError('no such\\nthing')\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_reports_the_interrupt(workdir, processes):
    words = ["max_steps=100000", f"launch.processes={processes}"]
    command = [sys.executable, "-m", "sparse_rl.cli", "train", "grpo.yaml", *words]
    pipes = {"stdout": -1, "stderr": -1, "text": True}
    with subprocess.Popen(command, cwd=workdir, env=without_launch(), start_new_session=True, **pipes) as process:
        assert any(line.startswith("step 1/100000") for line in process.stdout)
        for _ in range(3):  # C code sometimes drops the interrupt, and users press again
            os.killpg(process.pid, signal.SIGINT)  # to the launcher and its processes, as a terminal does
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, err = process.communicate(timeout=40)
                break
    assert process.returncode == 130
    assert err == f"sparse-rl: interrupted: {workdir / 'out'} has no checkpoint (save_steps: 0); start again\n"


@pytest.mark.slow
def test_an_option_that_trl_refuses_is_a_user_error(workdir):
    process = run(workdir, "train", "grpo.yaml", "log_completions_hub_repo=somewhere")
    assert process.returncode == 2
    assert len(process.stderr.splitlines()) == 1
    assert "log_completions is False" in process.stderr


@pytest.mark.slow
def test_a_training_prints_few_lines_and_nothing_on_stderr(workdir):
    (workdir / "my_rewards.py").write_text(REWARD)
    process = run(workdir, "train", "grpo.yaml", "max_steps=2", "rewards=[my_rewards:fair]")
    # a slow machine also prints lines that end in " s after the start"
    lines = [line for line in process.stdout.splitlines() if not line.endswith(" s after the start")]
    assert process.returncode == 0, process.stderr
    first_words = ["rollouts:", "attention", "step", "step", "2", "model:", "next:", "next:", "next:"]
    assert [line.split()[0] for line in lines] == first_words, process.stdout
    assert process.stderr == ""
    plotted = run(workdir, "plot", "out")
    assert plotted.returncode == 0
    assert (workdir / "out" / "plots" / "gap.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_reward_that_raises_gives_one_line(workdir, processes):
    (workdir / "my_rewards.py").write_text(RAISES)
    process = run(workdir, "train", "grpo.yaml", "rewards=[my_rewards:unfair]", f"launch.processes={processes}")
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("sparse-rl: error: rewards: unfair raised KeyError")
    assert "Traceback" in (workdir / "out" / "error.log").read_text()


@pytest.mark.parametrize("width", ["57", "80"])
def test_help_does_not_hyphenate_names(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for words in ([], *([command] for command in COMMANDS)):
        assert main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("deepseek-r1-distill-qwen-7b/streaming_plus" in line for line in lines)
    assert not [line for line in lines if line.endswith("-") and not line.endswith(" --")]
