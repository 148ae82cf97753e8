"""The system calls that a sandboxed process is refused, as a classic BPF program for bubblewrap's ``--seccomp``.

Namespaces, dropped capabilities and resource limits do most of the work. This filter refuses the rest: sockets of
families that a network namespace does not confine (a virtual machine's vsock reaches its host), input into a terminal
(TIOCSTI), memory that no limit of the sandbox counts (memfd, System V segments), and parts of the kernel that tests do
not need and that were exploited often: io_uring, bpf, userfaultfd, perf, keyrings, mounts.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Opcodes: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K, BPF_RET|BPF_K."""
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
"""Offsets in ``struct seccomp_data``: the low 32 bits of each argument, little-endian."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
X32_BIT = 0x40000000

REFUSED = (
    "acct", "add_key", "bpf", "delete_module", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick",
    "init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "kexec_file_load", "kexec_load", "keyctl",
    "memfd_create", "memfd_secret", "mount", "mount_setattr", "move_mount", "name_to_handle_at", "open_by_handle_at",
    "open_tree", "perf_event_open", "pivot_root", "quotactl", "reboot", "request_key", "setns", "shmget", "swapoff",
    "swapon", "syslog", "umount2", "unshare", "userfaultfd",
)  # fmt: skip
NEW = {
    "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "io_uring_enter": 426, "io_uring_register": 427,
    "io_uring_setup": 425, "memfd_secret": 447, "mount_setattr": 442, "move_mount": 429, "open_tree": 428,
}  # fmt: skip
"""Calls with one number on all architectures."""


@dataclass(frozen=True)
class Architecture:
    """An audit architecture and its numbers of system calls."""

    audit: int
    numbers: Mapping[str, int]


ARCHITECTURES: Mapping[str, Architecture] = {
    "x86_64": Architecture(
        0xC000003E,
        NEW | {
            "acct": 163, "add_key": 248, "bpf": 321, "delete_module": 176, "finit_module": 313, "init_module": 175,
            "ioctl": 16, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "memfd_create": 319, "mount": 165,
            "name_to_handle_at": 303, "open_by_handle_at": 304, "perf_event_open": 298, "pivot_root": 155,
            "quotactl": 179, "reboot": 169, "request_key": 249, "setns": 308, "shmget": 29, "socket": 41,
            "socketpair": 53, "swapoff": 168, "swapon": 167, "syslog": 103, "umount2": 166, "unshare": 272,
            "userfaultfd": 323,
        },
    ),
    "aarch64": Architecture(
        0xC00000B7,
        NEW | {
            "acct": 89, "add_key": 217, "bpf": 280, "delete_module": 106, "finit_module": 273, "init_module": 105,
            "ioctl": 29, "kexec_file_load": 294, "kexec_load": 104, "keyctl": 219, "memfd_create": 279, "mount": 40,
            "name_to_handle_at": 264, "open_by_handle_at": 265, "perf_event_open": 241, "pivot_root": 41,
            "quotactl": 60, "reboot": 142, "request_key": 218, "setns": 268, "shmget": 194, "socket": 198,
            "socketpair": 199, "swapoff": 225, "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97,
            "userfaultfd": 282,
        },
    ),
}  # fmt: skip

Instruction = tuple[int, int, int, int]
"""Opcode, jump if true, jump if false, operand."""


def program(machine: str) -> bytes:
    """The filter for ``machine`` (as ``platform.machine()`` names it). Raises KeyError where none is known."""
    architecture = ARCHITECTURES[machine]
    numbers = architecture.numbers
    instructions = [
        *_other_architectures(architecture),
        *(one for name in REFUSED for one in _refuse(numbers[name])),
        *_only(numbers["socket"], FIRST_ARGUMENT, FAMILIES),
        *_only(numbers["socketpair"], FIRST_ARGUMENT, FAMILIES),
        *_never(numbers["ioctl"], SECOND_ARGUMENT, (TIOCSTI, TIOCLINUX)),
        _return(ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions)


def _return(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def _other_architectures(architecture: Architecture) -> list[Instruction]:
    """32-bit and x32 calls have other numbers: a process that makes one ends."""
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, architecture.audit),
        _return(KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, X32_BIT),
        _return(KILL),
    ]


def _refuse(number: int) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, 1, number), _return(REFUSE)]


def _only(number: int, argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Refuse ``number`` where its argument is none of ``values``; leaves the number loaded."""
    checks = [(JUMP_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [
        (JUMP_EQUAL, 0, len(values) + 3, number),
        (LOAD, 0, 0, argument),
        *checks,
        _return(REFUSE),
        (LOAD, 0, 0, NUMBER),
    ]


def _never(number: int, argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Refuse ``number`` where its argument is one of ``values``; leaves the number loaded."""
    checks = [one for value in values for one in _refuse(value)]
    return [
        (JUMP_EQUAL, 0, len(checks) + 2, number),
        (LOAD, 0, 0, argument),
        *checks,
        (LOAD, 0, 0, NUMBER),
    ]
