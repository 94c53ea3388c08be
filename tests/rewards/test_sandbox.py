"""The sandbox confines a process on the real kernel. Machines that lack a part of it are imitated by filters that make
the part's system calls fail, and what is said about such a machine is true."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rewards import sandbox
from rewards.sandbox import absent_parts, call_filter

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(bool(absent_parts()), reason="this machine has no complete sandbox")

ATTEMPTS = {
    "read": "open('/etc/hostname').read()",
    "read our environment": "open('/proc/self/environ').read()",
    "write": "open('made', 'w')",
    "make a folder": "__import__('os').mkdir('made')",
    "truncate": "__import__('os').open(__import__('os').__file__, __import__('os').O_TRUNC)",
    "fork": "__import__('os').fork()",
    "start a program": "__import__('os').execv('/bin/true', ['true'])",
    "open a socket": "__import__('socket').socket()",
    "signal": "__import__('os').kill(__import__('os').getppid(), 0)",
    "own signals of a file": "__import__('fcntl').fcntl(0, __import__('fcntl').F_SETOWN, 1)",
    "share memory": "__import__('os').memfd_create('shared')",
    "raise a limit": "__import__('resource').setrlimit(__import__('resource').RLIMIT_NOFILE, (10**6, 10**6))",
}
TRIALS = f"""
import json, os
results = {{}}
for name, attempt in {ATTEMPTS!r}.items():
    try:
        eval(attempt)
        results[name] = 1
    except (OSError, ValueError):
        results[name] = 0
    if name == "fork" and results[name] and os.getpid() != pid:
        os._exit(0)
print(json.dumps(results))
""".replace("results = {}", "results, pid = {}, os.getpid()")

RUN = """
import json, sys
from rewards.code import CodeReward
from rewards.sandbox import absent_parts
program, options = json.loads(sys.argv[1])
try:
    reward = CodeReward(workers=1, timeout=2, **options)
except ValueError as error:
    print(json.dumps({"refused": str(error)}))
    sys.exit()
outputs = []
tests = [{"input": "", "output": ""}]
ask = reward._pool.ask
reward._pool.ask = lambda *a: outputs.append(ask(*a)) or outputs[-1]
reward(["```\\n" + program + "\\n```"], tests=[tests])
print(json.dumps({"absent": absent_parts(), "results": json.loads(outputs[0].get("output") or "{}"), "reply": outputs}))
"""


def run(program: str, before: str = "", command: Sequence[str] = (), **options: str) -> dict:
    """Return the outcome of a program in a new Python process, which first runs the statements `before`."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{before}\n{RUN}"
    arguments = [*command, sys.executable, "-c", script, json.dumps([program, options])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def without(*calls: int) -> str:
    """Return statements after which these system calls do not exist for this process and its children."""
    return f"""
import ctypes
from rewards import sandbox
code = b"".join([sandbox._load(0), *(part for call in {calls!r} for part in
    (sandbox._jump_unless(call, 1), sandbox._return(sandbox.ERRNO | sandbox.ENOSYS))), sandbox._return(sandbox.ALLOW)])
assert sandbox._libc().prctl(38, 1, 0, 0, 0) == 0
filter = sandbox._Program(len(code) // 8, code)
assert sandbox._libc().prctl(22, 2, ctypes.byref(filter), 0, 0) == 0
"""


def test_a_confined_process_can_only_compute():
    outcome = run(TRIALS)
    assert outcome["absent"] == []
    assert outcome["results"] == dict.fromkeys(ATTEMPTS, 0)


def test_the_trials_succeed_without_a_sandbox(tmp_path):
    (tmp_path / "os.py").write_text("")
    harmless = {name: attempt for name, attempt in ATTEMPTS.items() if name not in ("start a program", "truncate")}
    script = TRIALS.replace(repr(ATTEMPTS), repr(harmless))
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    results = json.loads(done.stdout)
    assert all(results[name] for name in ("read", "read our environment", "write", "fork", "open a socket", "signal"))


def test_a_machine_without_landlock_is_refused_or_named():
    lacking = without(sandbox.LANDLOCK_CREATE, sandbox.LANDLOCK_ADD, sandbox.LANDLOCK_RESTRICT)
    refused = run(TRIALS, lacking)["refused"]
    assert "no Landlock" in refused
    assert "sandbox: unsafe" in refused
    outcome = run(TRIALS, lacking, sandbox="unsafe")
    assert [part.split(",")[0] for part in outcome["absent"]] == ["no Landlock (Linux 5.13 or newer)"]
    assert outcome["results"] == dict.fromkeys(ATTEMPTS, 0) | {"read": 1, "read our environment": 1}


def test_a_machine_without_seccomp_is_refused_or_named():
    lacking = without(sandbox.SECCOMP[os.uname().machine])
    refused = run(TRIALS, lacking)["refused"]
    assert "no seccomp" in refused
    outcome = run(TRIALS, lacking, sandbox="unsafe")
    assert [part.split(",")[0] for part in outcome["absent"]] == ["no seccomp"]
    still_refused = {"read", "read our environment", "write", "make a folder", "start a program", "raise a limit"}
    assert {name for name, result in outcome["results"].items() if not result} >= still_refused
    assert outcome["results"]["fork"] == outcome["results"]["open a socket"] == 1


def test_a_sandbox_that_fails_stops_the_run_and_gives_no_reward():
    broken = "import rewards.code_worker, rewards.workers\nrewards.workers.START = rewards.workers.START.replace("
    broken += (
        "'module.main()', 'import resource; resource.setrlimit(resource.RLIMIT_AS, (2**25, 2**25)); module.main()')"
    )
    with pytest.raises(AssertionError, match="sandbox of the code reward cannot run programs"):
        run("print(1)", broken)


@pytest.mark.parametrize("names", [["--user"], ["--user", "--map-root-user"], ["--user", "--map-root-user", "--net"]])
def test_user_namespaces_make_no_difference(names):
    command = [shutil.which("unshare") or "unshare", *names]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine has no user namespaces")
    assert run(TRIALS, command=command)["results"] == dict.fromkeys(ATTEMPTS, 0)
    closed = "assert open('/proc/sys/user/max_user_namespaces', 'w').write('0')"
    if "--map-root-user" in names:
        assert run(TRIALS, closed, command)["results"] == dict.fromkeys(ATTEMPTS, 0)


def test_root_and_ordinary_users_are_confined_alike(tmp_path):
    """As root, the other user is nobody, who runs a Python that everybody can read."""
    python = next((path for path in (sys.executable, "/usr/bin/python3") if _readable_by_all(path)), None)
    if os.getuid() or python is None:
        pytest.skip("needs root, and a Python that every user may read")
    shutil.copytree(ROOT / "rewards", tmp_path / "rewards")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 5 != 5:
            folder.chmod(folder.stat().st_mode | 5)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RUN}"
    done = subprocess.run(
        [python, "-c", script, json.dumps([TRIALS, {}])], capture_output=True, text=True, cwd="/", user=65534,
        group=65534, extra_groups=[], env={"HOME": "/"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] == dict.fromkeys(ATTEMPTS, 0)


def _readable_by_all(path: str) -> bool:
    places = [Path(path).resolve(), *Path(path).resolve().parents]
    return Path(path).exists() and all(place.stat().st_mode & 1 for place in places)


@pytest.mark.parametrize("machine", sorted(sandbox.AUDIT))
@pytest.mark.parametrize("writing", [True, False])
def test_filters_end_every_path_with_a_decision(machine, writing):
    """Interpret the filter for every system call: it always returns, and only listed calls are allowed."""
    column = list(sandbox.AUDIT).index(machine)
    allowed = {entry[column] for entry in sandbox.CALLS.values()}
    checked = {entry[column] for entry in sandbox.CHECKED.values()}
    code = call_filter(machine, writing)
    for number in range(600):
        action = interpret(code, number, sandbox.AUDIT[machine])
        if number in allowed:
            assert action == sandbox.ALLOW
        elif number not in checked:
            assert action == sandbox.ERRNO | sandbox.EPERM
    assert interpret(code, 0, 0x40000003) == sandbox.KILL  # 32-bit programs


def test_arguments_decide_about_some_calls():
    code = call_filter("x86_64", writing=True)
    numbers = {name: entry[0] for name, entry in sandbox.CHECKED.items()}

    def allowed(name: str, *arguments: int) -> bool:
        return interpret(code, numbers[name], sandbox.AUDIT["x86_64"], *arguments) == sandbox.ALLOW

    thread = 0x3D0F00
    assert allowed("clone", thread)
    assert not allowed("clone", 17)  # a fork
    assert not allowed("clone", 0x4111)  # vfork
    assert allowed("prlimit64", 0, 9, 0)
    assert allowed("prlimit64", 0, sandbox.RLIMIT_STACK, 1 << 40)
    assert not allowed("prlimit64", 0, 9, 1 << 40)
    assert not allowed("prlimit64", 17, sandbox.RLIMIT_STACK, 0)
    assert allowed("openat", 0, 0, os.O_RDONLY | os.O_CLOEXEC)
    assert not allowed("openat", 0, 0, os.O_RDONLY | os.O_TRUNC)
    assert allowed("openat", 0, 0, os.O_WRONLY | os.O_TRUNC)  # Landlock decides
    assert not allowed("openat", 0, 0, 3)  # neither reading nor writing, for Landlock
    assert not allowed("openat", 0, 0, 3 | os.O_TRUNC)
    assert allowed("socketpair", 1, 1 | 0x80000)
    assert not allowed("socketpair", 1, 2)  # datagrams could go to any socket that has a name
    assert not allowed("socketpair", 2, 1)
    assert allowed("fcntl", 0, 3)
    assert not allowed("fcntl", 0, 8)  # F_SETOWN
    assert not allowed("prctl", 22)  # another filter
    strict = call_filter("x86_64", writing=False)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND):
        assert interpret(strict, numbers["openat"], sandbox.AUDIT["x86_64"], 0, 0, flags) != sandbox.ALLOW
    assert interpret(strict, numbers["openat"], sandbox.AUDIT["x86_64"], 0, 0, os.O_CLOEXEC) == sandbox.ALLOW


def interpret(code: bytes, number: int, machine: int, *arguments: int) -> int:
    """Return the action of a filter for a system call, by the rules of the kernel's packet filter."""
    data = number.to_bytes(4, "little") + machine.to_bytes(4, "little") + bytes(8)
    data += b"".join(argument.to_bytes(8, "little") for argument in (*arguments, 0, 0, 0, 0, 0, 0)[:6])
    place, word = 0, 0
    while True:
        kind = int.from_bytes(code[place : place + 2], "little")
        if_true, if_false = code[place + 2], code[place + 3]
        value = int.from_bytes(code[place + 4 : place + 8], "little")
        place += 8
        if kind == sandbox.LOAD:
            word = int.from_bytes(data[value : value + 4], "little")
        elif kind == sandbox.AND:
            word &= value
        elif kind == sandbox.JUMP_EQUAL:
            place += 8 * (if_true if word == value else if_false)
        elif kind == sandbox.JUMP_IF_ANY:
            place += 8 * (if_true if word & value else if_false)
        else:
            assert kind == sandbox.RETURN
            return value
