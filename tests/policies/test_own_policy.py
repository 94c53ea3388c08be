"""A cache policy of the user's own, in a file: the example of docs/extending.md. Replay under it is exact, it is known
by its file's content, and a mistake in it is one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from judging import trainer_gap, wrong_traces
from tiny import TRAINED, model_of, prompts_of

from rollout import SamplingConfig, make_engine
from sparse_rl.errors import UserError
from sparse_rl.models.directory import save_policy, saved_policy
from sparse_rl.policies import PolicyConfig, fingerprint, make_policy
from sparse_rl.trace import NEVER

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1]  # type: ignore[index]
OWN = {"policy": "my_policy.py:Valued", "budget": 20, "period": 8}
SAMPLING = SamplingConfig(max_tokens=30, seed=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_policy.py").write_text(EXAMPLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["qwen3", "quickstart"])
def test_replay_under_a_policy_from_a_file_is_exact(name: str) -> None:
    """Controls: evictions one position early or late, none, and those of other heads."""
    model = model_of(name)
    rollouts = make_engine("hf", model=model, policy=OWN).generate(prompts_of(name, (5, 20, 41)), SAMPLING)
    assert all(bool((rollout.trace.evict_at < NEVER).any()) for rollout in rollouts)
    assert trainer_gap(model, rollouts) <= 1e-5
    for kind, wrong in wrong_traces(rollouts).items():
        assert trainer_gap(model, wrong) >= 1e-3, kind


def test_settings_of_the_file_decide() -> None:
    """Another exponent evicts other entries; the default, written out, evicts the same."""
    model, prompts = model_of("qwen3"), prompts_of("qwen3", (41,))
    traces = [
        make_engine("hf", model=model, policy=policy).generate(prompts, SAMPLING)[0].trace.evict_at.tolist()
        for policy in (OWN, {**OWN, "power": 1.0}, {**OWN, "power": 3.0})
    ]
    assert traces[0] == traces[1]
    assert traces[0] != traces[2]


def test_a_saved_policy_is_used_only_with_its_file(folder: Path) -> None:
    """The file is refused before it runs. Controls: the old content, and settings without the recorded hash."""
    policy = make_policy(OWN)
    save_policy(folder, policy)
    loaded = saved_policy(folder)
    assert loaded is not None
    assert fingerprint(loaded) == fingerprint(policy)
    assert type(loaded) is type(policy)
    (folder / "my_policy.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match=r"my_policy\.py is not the file that was used: its SHA-256 is"):
        saved_policy(folder)
    (folder / "my_policy.py").unlink()
    with pytest.raises(UserError, match=r"cannot read my_policy\.py: .*run the command in the folder that has the"):
        saved_policy(folder)
    (folder / "my_policy.py").write_text(EXAMPLE)
    assert saved_policy(folder) is not None


def test_an_edited_file_gives_another_policy_in_the_same_process(folder: Path) -> None:
    before = make_policy(OWN)
    (folder / "my_policy.py").write_text(EXAMPLE.replace("power: float = 1.0", "power: float = 2.0"))
    after = make_policy(OWN)
    assert (before.config.power, after.config.power) == (1.0, 2.0)
    assert fingerprint(before) != fingerprint(after)


def test_settings_are_plain_values_again() -> None:
    config = PolicyConfig.from_block({**OWN, "power": 2})
    assert config == PolicyConfig.from_block(config.as_block())
    assert config.as_block()["policy"] == OWN["policy"]
    assert replace(config, budget=21) != config


HEAD = """from dataclasses import dataclass
from sparse_rl.methods.config import EvictingConfig
from sparse_rl.policies import Policy
"""
CONFIGURED = "class C(EvictingConfig):\n    power: int = 1\nclass P(Policy):\n    config: C\n"
FITTED = "from sparse_rl.methods.config import AMConfig\nclass P(Policy):\n    config: AMConfig\n"
SCORE = "    def score(self, layer, entries):\n        return entries.positions\n"


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("my_policy.py:Vaulued", EXAMPLE, "expected a subclass of sparse_rl.policies.Policy (did you mean 'Valued'?)"),
        ("my_policy.py:", EXAMPLE, "is not a cache policy"),
        ("my_policy.py:dataclass", EXAMPLE, "is not a cache policy"),
        ("other.py:Valued", EXAMPLE, "cannot read other.py: No such file"),
        (".py:Valued", EXAMPLE, "cannot read .py"),
        ("my_policy.py:P", "def", "cannot be loaded: SyntaxError"),
        ("my_policy.py:P", "import no_such_module", "cannot be loaded: ModuleNotFoundError"),
        ("my_policy.py:P", "\0", "cannot be loaded"),
        ("my_policy.py:P", HEAD + "class P(Policy):\n    config: EvictingConfig\n", "neither a method `score` nor"),
        ("my_policy.py:P", HEAD + "class P(Policy):\n    config: int\n" + SCORE, "is not a subclass of EvictingConfig"),
        (
            "my_policy.py:P",
            HEAD + "class P(Policy):\n    bias = 'b'\n" + SCORE,
            "may only evict, it cannot define bias",
        ),
        ("my_policy.py:P", HEAD + CONFIGURED + SCORE, "C lacks the decorator @dataclass(frozen=True, kw_only=True)"),
        ("my_policy.py:P", HEAD + FITTED + SCORE, "may only evict, it cannot define view_class, sections"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(folder: Path, name: str, source: str, message: str) -> None:
    (folder / "my_policy.py").write_text(source)
    with pytest.raises(UserError) as caught:
        make_policy(name, budget=20)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_settings_are_refused_and_a_policy_needs_none_of_its_own(folder: Path) -> None:
    with pytest.raises(UserError, match=r"has no parameter 'powr'.*did you mean 'power'"):
        make_policy({**OWN, "powr": 2})
    with pytest.raises(UserError, match="needs a budget"):
        make_policy("my_policy.py:Valued")
    (folder / "my_policy.py").write_text(HEAD + "class P(Policy):\n" + SCORE)
    assert make_policy("my_policy.py:P", budget=20).parameters()["budget"] == 20


@pytest.mark.slow
def test_vllm_and_hf_evict_alike_under_a_policy_from_a_file() -> None:
    """vLLM's worker is another process, which loads the file itself."""

    model, prompts = str(TRAINED["quickstart"][0]), prompts_of("quickstart", (20, 41))
    ours = make_engine("hf", model=model, policy=OWN).generate(prompts, SAMPLING)
    engine = make_engine("vllm", model=model, policy=OWN, dtype="float32")
    try:
        theirs = engine.generate(prompts, SAMPLING)
    finally:
        engine.close()
    assert [rollout.completion_ids for rollout in theirs] == [rollout.completion_ids for rollout in ours]
    assert [r.trace.evict_at.tolist() for r in theirs] == [r.trace.evict_at.tolist() for r in ours]
