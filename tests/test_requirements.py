"""The constraints for CUDA machines agree with the requirements of vLLM for CUDA, with ours, and with each other.

With a contradictory pin, `pip install -c requirements/cuda-constraints.txt` finds no solution. The container images and
the wheel are installed as the README says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sparse_rl import source

ROOT = Path(__file__).parents[1]
MACHINES = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0", "sys_platform": "linux", "extra": "",
     "platform_system": "Linux", "platform_machine": machine, "platform_python_implementation": "CPython"}
    for minor in (11, 12, 13)
    for machine in ("x86_64", "aarch64")
]  # fmt: skip


def lines(name: str) -> list[str]:
    """Return the lines of a file in requirements/, without comments."""
    text = (ROOT / "requirements" / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned(requirements: Iterable[str]) -> dict[str, Version]:
    """Return package name -> its pinned version."""
    pins = {}
    for requirement in map(Requirement, requirements):
        (specifier,) = (part for part in requirement.specifier if not part.version.endswith("+cpu"))
        name = canonicalize_name(requirement.name)
        assert specifier.operator == "==", str(requirement)
        assert requirement.marker is None, str(requirement)
        assert name not in pins, str(requirement)
        pins[name] = Version(specifier.version)
    return pins


def contradictions(pins: dict[str, Version], required: Iterable[str]) -> Iterator[str]:
    """Yield each requirement that applies to one of MACHINES and that the pinned version does not satisfy."""
    for requirement in map(Requirement, required):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is None or requirement.specifier.contains(pin, prereleases=True):
            continue
        if requirement.marker is None or any(requirement.marker.evaluate(machine) for machine in MACHINES):
            yield f"{requirement}, and {requirement.name} is pinned to {pin}"


PINS = pinned(lines("cuda-constraints.txt"))
VLLM = lines("vllm-requires-dist.txt")


def test_the_pins_satisfy_the_requirements_of_vllm():
    assert not list(contradictions(PINS, VLLM))
    assert f"vllm {PINS['vllm']}," in (ROOT / "requirements/vllm-requires-dist.txt").read_text()


@pytest.mark.parametrize("name", ["torch", "torchaudio", "torchvision"])
def test_the_pins_of_torch_take_builds_for_cuda_only(name):
    """`==2.13.0` takes 2.13.0+cpu too: pip installs it if it finds it, and vLLM for CUDA does not load with it."""
    (pin,) = (Requirement(line) for line in lines("cuda-constraints.txt") if Requirement(line).name == name)
    suffixes = ("", "+cu130", "+cpu")
    assert [pin.specifier.contains(f"{PINS[name]}{suffix}") for suffix in suffixes] == [True, True, False]


def test_the_pins_satisfy_the_requirements_of_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    assert not list(contradictions(PINS, required))
    assert {canonicalize_name(Requirement(item).name) for item in required} <= PINS.keys()


def test_the_pins_satisfy_each_other():
    """Only packages installed here in exactly the pinned version can be checked."""
    required = {}
    for package in distributions():
        name = canonicalize_name(package.metadata["Name"])
        if PINS.get(name) == Version(package.version):
            required[name] = list(contradictions(PINS, package.requires or []))
    assert len(required) > 100
    assert not {name: wrong for name, wrong in required.items() if wrong}


@pytest.mark.parametrize(
    ("pins", "wrong"),
    [
        ({"apache-tvm-ffi": "0.1.15.post2"}, 1),
        ({"transformers": "5.20.0", "torch": "2.12.0"}, 2),
        ({"protobuf": "6.33.1"}, 1),
        ({"protobuf": "7.36.2"}, 0),  # the other pin is for s390x, which has no CUDA
        ({"scipy": "1.0", "helion": "0.1"}, 0),  # extras that are not requested
    ],
)
def test_control_contradictions_are_found(pins, wrong):
    """`wrong` is the number of vLLM's requirements that the pins contradict."""
    assert len(list(contradictions({name: Version(pin) for name, pin in pins.items()}, VLLM))) == wrong


def test_messages_name_a_version_of_vllm_that_this_project_asks_for():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert extra == [f"vllm=={source.VLLM}"]
    assert f'pip install "{extra[0]}"' == source.INSTALL_VLLM


@pytest.mark.parametrize(
    ("url", "extra", "command"),
    [
        ("", "vllm", '`pip install ".[vllm]"` in a checkout of it'),
        ("git+https://there/sparse-rl", "", '`pip install "sparse-rl @ git+https://there/sparse-rl"`'),
        ("git+https://there/sparse-rl", "vllm", '`pip install "sparse-rl[vllm] @ git+https://there/sparse-rl"`'),
    ],
)
def test_the_install_command_needs_no_package_index(monkeypatch, url, extra, command):
    monkeypatch.setattr("sparse_rl.source.URL", url)
    assert source.how_to_install(extra) == command


def documented_commands() -> set[str]:
    """Return the commands of the README, and `make TARGET` for each target of the Makefile."""
    blocks = re.findall(r"^    (.*)$", (ROOT / "README.md").read_text(), re.M)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    return {command.strip() for line in blocks for command in line.split("&&")} | {f"make {name}" for name in targets}


@pytest.mark.parametrize(("image", "last"), [("Dockerfile", "make install"), ("Dockerfile.cuda", "pip install -c ")])
def test_an_image_is_installed_by_documented_commands(image, last):
    runs = re.findall(r"^RUN (.*)$", (ROOT / image).read_text().replace("\\\n", ""), re.M)
    system, *installed = ([command.strip() for command in run.split("&&")] for run in runs)
    assert system[0] == "apt-get update"
    assert {command for run in installed for command in run} <= documented_commands()
    assert installed[-1][-1].startswith(last)


def test_an_image_has_all_packages():
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {f"!{pattern.removesuffix('*')}" for pattern in include} <= set((ROOT / ".dockerignore").read_text().split())


@pytest.mark.slow
def test_a_built_wheel_runs_the_quickstart_without_the_sources(tmp_path):
    """The quickstart is stopped once the shipped model is evaluated and RL-Sparse has logged a step."""
    sources, venv, out = tmp_path / "sources", tmp_path / "venv", tmp_path / "elsewhere/runs/quickstart"
    for package in ("sparse_rl", "rollout", "trainer", "rewards", "recipes"):  # building writes among the sources
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, sources)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", sources], check=True, cwd=tmp_path
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # behind the wheel's own packages
    out.parents[1].mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [venv / "bin/sparse-rl", "quickstart"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        command, cwd=out.parents[1], env=environment, stdout=log, stderr=log, start_new_session=True
    ) as process:  # fmt: skip
        try:
            wanted = (out / "eval_before_rl/eval.json", out / "seed0/grpo/metrics.jsonl")
            deadline = time.monotonic() + 900
            while not all(path.is_file() and path.stat().st_size for path in wanted):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    first = json.loads(wanted[0].read_text())["rows"][0]
    assert (first["policy"], round(first["accuracy"], 2)) == ("streaming", 0.23)
    assert json.loads(wanted[1].read_text().splitlines()[0])["replay/gap_max"] < 1e-5
