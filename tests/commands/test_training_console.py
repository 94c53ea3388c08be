"""Besides its logs, a training prints its choices (engine, kernel), slow steps, the resumed step and the next
commands."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shlex
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sparse_rl import progress
from sparse_rl.attention.parity import Parity
from sparse_rl.commands.arguments import read_recipe
from sparse_rl.commands.checks import prepare_training
from sparse_rl.commands.main import main, parse
from sparse_rl.commands.train import compile_attention, what_next
from sparse_rl.policies import make_policy
from trainer.card import model_card

NO_GPU = "there is no GPU, and on a CPU FlexAttention has no backward"
QUIET = ("rollout.progress=false", "rollout.engine=auto")


@pytest.fixture
def without_vllm(monkeypatch):
    """Simulate a machine without vllm and without a GPU."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_command_prints_why_auto_falls_back_to_hf(workdir, without_vllm, capsys):
    fallback = 'rollouts: hf engine (vllm is not installed: pip install "vllm==0.31.*")'
    assert main(["rollout", "grpo.yaml", *QUIET]) == 0
    assert capsys.readouterr().out.splitlines()[0] == fallback
    assert main(["eval", "eval.yaml", *QUIET]) == 0
    assert capsys.readouterr().out.splitlines()[0] == fallback
    prepare_training(read_recipe(parse(["train", "grpo.yaml", *QUIET])))
    assert capsys.readouterr().out.splitlines() == [fallback, f"attention kernel: gather ({NO_GPU})"]


def test_only_rank_0_prints_the_choices(workdir, without_vllm, capsys, monkeypatch):
    recipe = read_recipe(parse(["train", "grpo.yaml", *QUIET]))
    monkeypatch.setenv("RANK", "1")
    prepare_training(recipe)
    assert capsys.readouterr().out == ""


def test_slow_steps_on_a_gpu_are_announced(workdir, without_vllm, capsys, monkeypatch):
    """On a GPU, the kernel check is announced with its duration in seconds, and the largest row size is compiled before
    the first step."""
    choice = "sparse_rl.attention.choice"
    monkeypatch.setattr(f"{choice}.will_check", lambda wanted: wanted == "auto")
    monkeypatch.setattr(f"{choice}.choose_kernel", lambda *_: ("flex_sorted", str(Parity("flex_sorted", seconds=31.4))))
    monkeypatch.setattr(f"{choice}.check_target", lambda *_: Parity("flex", failure="no", seconds=7))
    recipe = read_recipe(parse(["train", "grpo.yaml", *QUIET]))
    monkeypatch.setattr(type(recipe), "foresees", lambda _: True)
    chosen = prepare_training(recipe).recipe
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if not line.startswith("rollouts: ")] == [
        "attention kernel: compiling and checking FlexAttention on this GPU, which takes a while",
        "attention kernel: flex_sorted is exact here (error / allowed: ); checked in 31 s",
        "scorers' target: flex is not used: no; checked in 7 s",
    ]
    compilations, model = [], torch.nn.Linear(2, 2)
    model.config = "its configuration"
    accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=contextlib.nullcontext)
    trainer = SimpleNamespace(model=model, accelerator=accelerator)
    monkeypatch.setattr(
        "sparse_rl.attention.ahead.compile_ahead", lambda *args, **options: compilations.append((*args, options))
    )
    monkeypatch.setattr(type(recipe), "longest_row", lambda *_: 1000)
    compile_attention(trainer, chosen)
    output = "attention kernel: compiling for rows of 1024 tokens; 5 smaller sizes follow when first needed"
    assert capsys.readouterr().out.splitlines() == [output]
    rows = recipe.training.per_device_train_batch_size
    device_and_dtype = accelerator.device, torch.float32
    assert compilations == [("flex_sorted", "its configuration", rows, 1000, *device_and_dtype, {"target": True})]
    compile_attention(trainer, recipe.with_attention_kernel("sdpa"))
    assert len(compilations) == 1
    assert not capsys.readouterr().out


def test_a_training_resolves_its_settings_once(workdir, without_vllm, monkeypatch):
    """In one training, each of six functions that choose or load something is called exactly once."""
    calls = Counter()

    def count(path):
        module, _, name = path.rpartition(".")
        plain = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(path, lambda *given, **options: calls.update([name]) or plain(*given, **options))

    for path in (
        *("rollout.choice.choose_engine", "sparse_rl.attention.choice.choose_kernel", "rewards.make_rewards"),
        *("sparse_rl.commands.prepared.load_tokenizer", "sparse_rl.commands.examples.load_data"),
        "sparse_rl.commands.prepared.check_weights",
    ):
        count(path)
    assert main(["train", "grpo.yaml", *QUIET]) == 0
    assert len(calls) == 6
    assert set(calls.values()) == {1}


class CudaUsed(BaseException):
    """The error that the first use of a GPU raises in the tests."""


def test_each_rank_selects_its_gpu_before_using_cuda(workdir, monkeypatch):
    """On a simulated machine with two GPUs, rank 1 first selects GPU 1, and only then uses CUDA. Before the selection,
    "cuda" would mean GPU 0 in every rank."""
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


def test_a_training_ends_with_the_next_commands_and_reports_resuming(workdir, capsys, monkeypatch):
    """The last lines of a training are commands (`eval`, `serve`, `plot`) that work unchanged, also with a space in the
    run's name. A resumed training says from which step it continues."""
    monkeypatch.setattr(progress, "FIRST_SIGN", 0.01)
    words = ["train", "sft.yaml", "output_dir=my run", "save_steps=1", "lr_scheduler_type=constant", "logging_steps=1"]
    assert main(words) == 0
    *text, model, evaluate, serve, plot = capsys.readouterr().out.splitlines()
    assert model == "model: my run/model"
    assert text[0].startswith(("loading, ", "checking, "))
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
    monkeypatch.setattr(progress, "FIRST_SIGN", 1000)
    assert main([*words, "max_steps=3", "--resume"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "resuming from step 1: my run/checkpoint-1"
    assert [line.split()[1] for line in out if line.startswith("step ")] == ["2/3", "3/3"]


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
    """The end of a training and the model's card propose a server only if this server supports the family and the cache
    of the model."""
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
