"""The constraints for CUDA machines agree with the requirements of vLLM for CUDA, with ours, and with each other.

With a contradictory pin, `pip install -c requirements/cuda-constraints.txt` finds no solution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


@pytest.mark.slow
def test_an_installed_wheel_works_without_the_sources(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    sources = tmp_path / "sources"  # a copy, since building a wheel writes files among its sources
    for package in ("sparse_rl", "rollout", "trainer", "rewards", "recipes"):
        shutil.copytree(ROOT / package, sources / package)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, sources)
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(sources)]
    subprocess.run(wheel, check=True, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "site"), str(built)], check=True)
    process = subprocess.run(
        [sys.executable, "-c", "import sparse_rl, sparse_rl.cli; print(sparse_rl.__file__); sparse_rl.cli.main()",
         "train", "quickstart/grpo", "output_dir=run", "--dry-run"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(str(tmp_path / "site"))
