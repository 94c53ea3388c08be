"""Confines the calling process, for good, before it runs a program that a model wrote. Linux on x86-64 and arm64.

    absent_parts()             -> texts about the parts that this machine lacks; empty if the sandbox is complete
    sandbox = Sandbox(readable)    prepares the parts that this machine has
    sandbox.confine(cpu_seconds, memory)    confines the process

The parts need neither root nor user namespaces nor a server, and also work in a container:

- Landlock (Linux 5.13): the process can open only files below `readable`, for reading, and /dev/null.
- seccomp: only the system calls in CALLS. There is no call among them that starts a process or a program, opens a
  connection, changes the file system, sends a signal, looks into another process, or shares memory with one.
- Limits of processor time, address space and open files. Without capabilities, root cannot raise them.

The process keeps its open files, so the caller closes all that the program must not have.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable, Iterator
from functools import cache

# System calls that a confined process may make: name -> number on x86-64 and on arm64. None: the call does not exist.
CALLS: dict[str, tuple[int | None, int | None]] = {
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "brk": (12, 214), "membarrier": (324, 283),
    # open files and pipes
    "read": (0, 63), "readv": (19, 65), "pread64": (17, 67), "preadv": (295, 69),
    "write": (1, 64), "writev": (20, 66), "pwrite64": (18, 68), "pwritev": (296, 70),
    "lseek": (8, 62), "close": (3, 57), "close_range": (436, 436), "fstat": (5, 80), "fadvise64": (221, 223),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "fsync": (74, 82), "fdatasync": (75, 83),
    # a pair of connected sockets inside the process, as asyncio needs it
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
    # names of files; Landlock decides about their contents
    "stat": (4, None), "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43),
    "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    # threads, and signals that arrive
    "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "set_tid_address": (218, 96), "gettid": (186, 178), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "setitimer": (38, 103), "getitimer": (36, 102), "restart_syscall": (219, 128),
    "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    # time, and facts about the process and the machine
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153), "getrusage": (98, 165),
    "sysinfo": (99, 179), "uname": (63, 160), "getrandom": (318, 278), "getrlimit": (97, 163), "getcpu": (309, 168),
    "getpid": (39, 172), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155), "getsid": (124, 156),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "getpriority": (140, 141),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "get_mempolicy": (239, 236),
}  # fmt: skip
# System calls that `_conditions` allows only with certain arguments, and clone3.
CHECKED: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "clone3": (435, 435), "prctl": (157, 167),
    "prlimit64": (302, 261), "ioctl": (16, 29), "fcntl": (72, 25), "socketpair": (53, 199),
}  # fmt: skip
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # machine -> the kernel's number of its system call interface
SECCOMP = {"x86_64": 317, "aarch64": 277}
CAPSET = {"x86_64": 126, "aarch64": 91}
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
CLONE_THREAD = 0x10000
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# of ioctl: TCGETS, the window's size, FIONREAD, FIONBIO, close on exec
TERMINAL_QUESTIONS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
FILE_FLAGS = (0, 1, 2, 3, 4, 1030)  # of fcntl: duplicate, read and set flags; none that sends signals
NAMES = (15, 16, 0x53564D41)  # of prctl: set and get the thread's name, name a range of memory
RLIMIT_STACK = 3
EPERM, ENOTTY, ENOSYS = 1, 25, 38
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x50000, 0x80000000  # actions of a filter; an error's number is added to ERRNO
LOAD, JUMP_EQUAL, JUMP_IF_ANY, AND, RETURN = 0x20, 0x15, 0x45, 0x54, 0x06  # instructions of a filter


def absent_parts() -> list[str]:
    """Return a text about each part of the sandbox that this machine lacks."""
    if not _supported():
        return [f"the sandbox needs Linux on {' or '.join(AUDIT)}, and this is {sys.platform} on {platform.machine()}"]
    absent = []
    if _landlock_version() < 1:
        absent.append("no Landlock (Linux 5.13 or newer), so programs could read files of the user")
    if not _has_seccomp():
        absent.append("no seccomp, so programs could start processes, use the network and signal other processes")
    return absent


class Sandbox:
    """The parts that this machine has, prepared for processes that are forked later. Uses one open file.

    readable : folders and files that a confined process can read
    """

    def __init__(self, readable: Iterable[str]) -> None:
        self.complete = not absent_parts()
        self._rules = _rules(readable) if _supported() and _landlock_version() >= 1 else None
        writing = self._rules is not None
        self._filter = call_filter(platform.machine(), writing) if _supported() and _has_seccomp() else None

    def confine(self, cpu_seconds: int, memory: int, open_files: int = 64) -> None:
        """Confine this process, which must have one thread only. Raises OSError or ValueError if a part fails.

        cpu_seconds, memory : limits of processor time in whole seconds, and of address space in bytes
        """
        import resource

        for kind, limit in (("AS", memory), ("CPU", cpu_seconds), ("NOFILE", open_files), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (limit, limit))
        if not _supported():
            return
        _check(_libc().prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
        header = struct.pack("=Ii", 0x20080522, 0)  # of the call that drops capabilities: version 3, this process
        _check(_call(CAPSET[platform.machine()], header, bytes(24)), "capset")
        if self._rules is not None:
            _check(_call(LANDLOCK_RESTRICT, self._rules, 0), "landlock_restrict_self")
        if self._filter is not None:
            program = _Program(len(self._filter) // 8, self._filter)
            unslowed = 4  # SECCOMP_FILTER_FLAG_SPEC_ALLOW: without it, older kernels slow the process down
            _check(_call(SECCOMP[platform.machine()], 1, unslowed, ctypes.byref(program)), "seccomp")


def _supported() -> bool:
    return sys.platform.startswith("linux") and platform.machine() in AUDIT


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *words))


def _check(result: int, action: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{action}: {os.strerror(error)}")
    return result


def _landlock_version() -> int:
    return _call(LANDLOCK_CREATE, None, 0, 1)


def _rules(readable: Iterable[str]) -> int:
    """Return an open file with rules: nothing may be opened but `readable` for reading, and /dev/null."""
    version = _landlock_version()
    rights = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1  # each version has one right more
    attributes = struct.pack("=QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)  # files, TCP, scopes
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _check(_call(LANDLOCK_CREATE, attributes[:size], size, 0), "landlock_create_ruleset")
    read_file, read_folder, write_file = 1 << 2, 1 << 3, 1 << 1
    for path in readable:
        _allow(rules, path, read_file | read_folder if os.path.isdir(path) else read_file)
    _allow(rules, os.devnull, read_file | write_file)
    return rules


def _allow(rules: int, path: str, allowed: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", allowed, file)
        _check(_call(LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(file)


def _has_seccomp() -> bool:
    action = ctypes.c_uint32(ERRNO)
    return _call(SECCOMP[platform.machine()], 2, 0, ctypes.byref(action)) == 0  # SECCOMP_GET_ACTION_AVAIL


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def call_filter(machine: str, writing: bool) -> bytes:
    """Return the filter of system calls as code of the kernel's packet filter (BPF), 8 bytes an instruction.

    machine : x86_64 or aarch64
    writing : False refuses to open files for writing; True leaves that to Landlock
    """
    column = list(AUDIT).index(machine)
    numbers = {name: entry[column] for name, entry in CHECKED.items()}
    code = [_load(4), _instruction(JUMP_EQUAL, 1, 0, AUDIT[machine]), _return(KILL), _load(0)]
    for name, block in _conditions(writing):
        number = numbers[name]
        if number is not None:
            code += [_jump_unless(number, len(block)), *block]
    for entry in CALLS.values():
        number = entry[column]
        if number is not None:
            code += [_jump_unless(number, 1), _return(ALLOW)]
    code.append(_return(ERRNO | EPERM))
    return b"".join(code)


def _conditions(writing: bool) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the name of a system call, and the instructions that decide about it from its arguments."""
    refuse = _return(ERRNO | EPERM)
    yield "clone", [_argument(0), _instruction(JUMP_IF_ANY, 0, 1, CLONE_THREAD), _return(ALLOW), refuse]
    yield "clone3", [_return(ERRNO | ENOSYS)]  # its flags are in memory; the C library then uses clone
    yield "prctl", _one_of(0, NAMES, EPERM)
    yield "ioctl", _one_of(1, TERMINAL_QUESTIONS, ENOTTY)
    yield "fcntl", _one_of(1, FILE_FLAGS, EPERM)
    # A pair of datagram sockets could send to any socket that has a name.
    stream = [_argument(1), _instruction(AND, 0, 0, 0xF), _jump_unless(1, 1), _return(ALLOW), refuse]
    yield "socketpair", [_argument(0), _instruction(JUMP_EQUAL, 1, 0, 1), refuse, *stream]  # AF_UNIX, SOCK_STREAM
    own = [_argument(0), _instruction(JUMP_EQUAL, 1, 0, 0), refuse]
    stack = [_argument(1), _jump_unless(RLIMIT_STACK, 1), _return(ALLOW)]
    question = [_argument(2), _jump_unless(0, 3), _argument(2, upper=True), _jump_unless(0, 1), _return(ALLOW)]
    yield "prlimit64", [*own, *stack, *question, refuse]
    for name, place in (("open", 1), ("openat", 2)):
        writes = [_instruction(JUMP_IF_ANY, 0, 1, WRITING), refuse]
        # Landlock does not see these two: access mode 3, and truncation of a file that is opened for reading.
        neither = [_instruction(AND, 0, 0, os.O_ACCMODE), _jump_unless(os.O_ACCMODE, 1), refuse, _argument(place)]
        truncates = [_instruction(AND, 0, 0, os.O_ACCMODE | os.O_TRUNC), _jump_unless(os.O_TRUNC, 1), refuse]
        yield name, [_argument(place), *([*neither, *truncates] if writing else writes), _return(ALLOW)]


def _one_of(place: int, values: Iterable[int], error: int) -> list[bytes]:
    """Return instructions that allow a call if an argument is one of `values`, and refuse it with `error` otherwise."""
    checks = [part for value in values for part in (_jump_unless(value, 1), _return(ALLOW))]
    return [_argument(place), *checks, _return(ERRNO | error)]


def _argument(place: int, upper: bool = False) -> bytes:
    return _load(16 + 8 * place + 4 * upper)  # both machines store the lower half first


def _load(offset: int) -> bytes:
    return _instruction(LOAD, 0, 0, offset)


def _jump_unless(value: int, skipped: int) -> bytes:
    """Return the instruction that skips `skipped` instructions unless the loaded word equals `value`."""
    return _instruction(JUMP_EQUAL, 0, skipped, value)


def _return(action: int) -> bytes:
    return _instruction(RETURN, 0, 0, action)


def _instruction(code: int, jump_if_true: int, jump_if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_if_true, jump_if_false, value)
