"""Besides its logs, a training prints its choices (engine, kernel), slow steps, the resumed step and the next
commands."""

import contextlib
import importlib
import importlib.util
import shlex
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sparse_rl.commands.arguments import read_recipe
from sparse_rl.commands.main import main, parse
from sparse_rl.commands.train import compile_attention, what_next
from sparse_rl.kernels.parity import Parity
from sparse_rl.methods.kvpop.target import FutureTarget
from sparse_rl.policies import make_policy
from trainer.export import model_card
from trainer.rundir import RunLog

NO_GPU = "there is no GPU, and on a CPU FlexAttention has no backward"
QUIET = ("rollout.progress=false", "rollout.engine=auto")


@pytest.fixture
def without_vllm(monkeypatch):
    """Simulate a machine without vllm and without a GPU."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_command_prints_why_auto_falls_back_to_hf(workdir, without_vllm, capsys):
    fallback = 'rollouts: hf engine (vllm is not installed: pip install "vllm==0.32.*")'
    assert main(["rollout", "grpo.yaml", *QUIET]) == 0
    assert capsys.readouterr().out.splitlines()[0] == fallback
    assert main(["eval", "eval.yaml", *QUIET]) == 0
    assert capsys.readouterr().out.splitlines()[0] == fallback
    read_recipe(parse(["train", "grpo.yaml", *QUIET])).prepare_training()
    assert capsys.readouterr().out.splitlines() == [fallback, f"attention kernel: gather ({NO_GPU})"]


def test_only_rank_0_prints_the_choices(workdir, without_vllm, capsys, monkeypatch):
    recipe = read_recipe(parse(["train", "grpo.yaml", *QUIET]))
    monkeypatch.setenv("RANK", "1")
    recipe.prepare_training()
    assert capsys.readouterr().out == ""


def test_slow_steps_on_a_gpu_are_announced(workdir, without_vllm, capsys, monkeypatch):
    choice = "sparse_rl.attention.startup"
    monkeypatch.setattr(f"{choice}.will_check", lambda wanted: wanted == "auto")
    monkeypatch.setattr(f"{choice}.choose_kernel", lambda *_: ("flex_sorted", str(Parity("flex_sorted"))))
    monkeypatch.setattr(f"{choice}.check_target", lambda *_: Parity("flex", failure="no"))
    recipe = read_recipe(parse(["train", "grpo.yaml", *QUIET]))
    monkeypatch.setattr(type(recipe), "foresees", lambda _: True)
    chosen = recipe.prepare_training().recipe
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if not line.startswith("rollouts: ")] == [
        "attention kernel: compiling and checking FlexAttention on this GPU, which takes a while",
        "attention kernel: flex_sorted is exact here (error / allowed: )",
        "scorers' target: flex is not used: no",
    ]
    compilations, model = [], torch.nn.Linear(2, 2)
    model.config = "its configuration"
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    trainer = SimpleNamespace(model=model, accelerator=accelerator)
    monkeypatch.setattr("sparse_rl.attention.startup.compile_ahead", lambda *args: compilations.append(args))
    monkeypatch.setattr(type(recipe), "longest_row", lambda *_: 1000)
    compile_attention(trainer, chosen)
    output = "attention kernel: compiling for rows of 1024 tokens"
    assert capsys.readouterr().out.splitlines() == [output]
    rows = recipe.training.per_device_train_batch_size
    device_and_dtype = accelerator.device, torch.float32
    ((*given, target),) = compilations
    assert given == ["flex_sorted", "its configuration", rows, 1000, *device_and_dtype]
    assert isinstance(target, FutureTarget)
    compile_attention(trainer, recipe.with_attention_kernel("sdpa"))
    assert len(compilations) == 1
    assert not capsys.readouterr().out


def test_a_training_resolves_its_settings_once(workdir, without_vllm, monkeypatch):
    calls = Counter()

    def count(path):
        module, _, name = path.rpartition(".")
        plain = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(path, lambda *given, **options: calls.update([name]) or plain(*given, **options))

    for path in (
        *("rollout.engine.choose_engine", "sparse_rl.attention.startup.choose_kernel", "rewards.make_rewards"),
        *("sparse_rl.models.load.load_tokenizer", "sparse_rl.data.problems.load_data"),
        "sparse_rl.models.weights.check_weights",
    ):
        count(path)
    assert main(["train", "grpo.yaml", *QUIET]) == 0
    assert len(calls) == 6
    assert set(calls.values()) == {1}


class CudaUsed(BaseException):
    """The error that the first use of a GPU raises in the tests."""


def test_each_rank_selects_its_gpu_before_using_cuda(workdir, monkeypatch):
    """Before the selection, "cuda" would mean GPU 0 in every rank."""
    events = []

    def touch():
        events.append("touched")
        raise CudaUsed

    cuda = {"is_available": lambda: True, "device_count": lambda: 2, "set_device": events.append, "_lazy_init": touch}
    for name, value in cuda.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    for name, number in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(number))
    with contextlib.suppress(CudaUsed):
        main(["train", "grpo.yaml", "launch.processes=2", "attention_kernel=auto"])
    assert events == [1, "touched"]


def test_a_training_ends_with_the_next_commands_and_reports_resuming(workdir, capsys):
    words = ["train", "sft.yaml", "output_dir=my run", "save_steps=1", "lr_scheduler_type=constant", "logging_steps=1"]
    assert main(words) == 0
    *text, model, evaluate, serve, plot = capsys.readouterr().out.splitlines()
    assert model == "model: my run/model"
    assert any(line.startswith("step 1/1  ") for line in text)
    assert evaluate.startswith("next:  sparse-rl eval quickstart/eval model='my run' ")
    assert serve.startswith("next:  sparse-rl serve 'my run' ")
    assert plot.startswith("next:  sparse-rl plot 'my run' ")
    for line, options in (
        (evaluate, ["tasks.running_sum.synthetic.size=4", "output_dir=score", "rollout.engine=hf"]),
        (plot, []),
    ):
        _, command, *arguments = shlex.split(line, comments=True)
        assert command == "sparse-rl"
        assert main([*arguments, *options]) == 0
    capsys.readouterr()
    assert main([*words, "max_steps=3", "--resume"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "resuming from step 1: my run/checkpoint-1"
    assert [line.split()[1] for line in out if line.startswith("step ")] == ["2/3", "3/3"]


def test_a_run_without_changed_weights_offers_a_report_instead_of_a_server(workdir, capsys):
    for recipe, key, cause in (
        ("sft.yaml", "learning_rate=1e-30", "raise learning_rate, or train in float32"),
        ("grpo.yaml", "max_completion_length=3", "every completion was cut off"),
    ):
        assert main(["train", recipe, f"output_dir={recipe}-run", "model=quickstart/model", key]) == 0
        output = capsys.readouterr()
        line = f"the weights did not change, and the final model equals the start model: {cause}"
        assert f"sparse-rl: warning: {line}" in output.err
        (following,) = [line for line in output.out.splitlines() if line.startswith("next:")]
        _, command, *arguments = shlex.split(following, comments=True)
        assert [command, *arguments] == ["sparse-rl", "report", f"{recipe}-run"]
        assert main(arguments) == 0
        assert line in (workdir / f"{recipe}-run/report.html").read_text()


@pytest.mark.parametrize("save_steps", [1, 0])
def test_an_interrupted_training_names_the_command_that_resumes(workdir, capsys, monkeypatch, save_steps):
    words = ["sft.yaml", "output_dir=my run", f"save_steps={save_steps}", "max_steps=3", "logging_steps=1"]
    on_log = RunLog.on_log

    def interrupting(self, args, state, *given, **options):
        if state.global_step == 2:
            raise KeyboardInterrupt
        on_log(self, args, state, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "on_log", interrupting)
        assert main(["train", *words]) == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    if not save_steps:
        assert line == "sparse-rl: interrupted: my run has no checkpoint (save_steps: 0); start again"
        return
    start, _, command = line.partition("; continue with: sparse-rl ")
    assert start == "sparse-rl: interrupted: my run/checkpoint-1 is complete"
    assert shlex.split(command) == ["train", *words, "--resume"]
    assert main(shlex.split(command)) == 0
    assert (workdir / "my run/model").is_dir()


def test_a_run_with_held_out_problems_is_evaluated_by_its_name(workdir):
    held_out = "validation={data: {synthetic: {task: running_sum, size: 9, split: evaluation}}}"
    recipe = read_recipe(parse(["train", "grpo.yaml", "output_dir=run", held_out]))
    assert what_next(recipe).splitlines()[0].startswith("next:  sparse-rl eval run ")
    recipe = read_recipe(parse(["train", "grpo.yaml", "output_dir=run", "data={path: own.jsonl}"]))
    assert what_next(recipe).splitlines()[0].startswith("next:  sparse-rl eval eval/math500 model=run ")


@pytest.mark.parametrize(
    ("recipe", "cache", "family_is_served", "is_served"),
    [
        ("grpo.yaml", "{policy: streaming, budget: 9}", True, True),
        ("grpo.yaml", "{policy: streaming, budget: 9}", False, False),
        ("grpo.yaml", "lined", True, False),
        ("distill.yaml", "clustered", True, False),
        ("sft.yaml", None, True, True),
        ("sft.yaml", None, False, False),
        ("quickstart/kvpop", None, True, True),
        ("quickstart/kvpop", "dms", True, False),
    ],
)
def test_a_server_is_proposed_only_if_it_supports_the_model(workdir, recipe, cache, family_is_served, is_served):
    words = ["train", recipe, "output_dir=run", *([f"cache={cache}"] if cache else [])]
    training = read_recipe(parse(words))
    following = what_next(training, served=family_is_served).splitlines()
    assert ["serve" in line.split() for line in following] == [False, *[True] * is_served, False]
    carried = getattr(training, "cache", None)
    policy = None if carried is None else make_policy(carried)
    card = model_card(training.resolved(), policy, {}, steps=1, place="run/model", served=family_is_served)
    _, commands, *_ = card.split("```bash\n")
    proposed = [line.split()[1] for line in commands.partition("```")[0].splitlines()]
    assert proposed == [*["serve"] * is_served, "eval"]
    assert ("quickstart/eval" in commands) is (training.data.synthetic is not None)
    assert f'`pip install ".{"[vllm]" * is_served}"`' in card
