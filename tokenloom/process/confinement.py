"""Takes from a process what it does not need once it is ready: the network, other programs, and other processes.

A filter of system calls (seccomp) does so. It needs no privilege, so it works in containers too, and it cannot be
lifted again. What is refused fails with EPERM.
"""

import ctypes
import platform
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _SECCOMP_SET_MODE_FILTER, _ALL_THREADS = 38, 1, 1
_ALLOW, _REFUSE = 0x7FFF_0000, 0x0005_0000 | 1  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO with EPERM
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of classic BPF
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in the data that the filter sees
_X32_BIT = 0x4000_0000
# socket, socketpair, connect, accept, bind, listen, sendto, execve, execveat, ptrace, process_vm_readv,
# process_vm_writev, kill, tkill, tgkill, io_uring_setup, bpf, pidfd_open, pidfd_getfd, userfaultfd, mount, unshare,
# setns
_X86_64 = (
    *(41, 53, 42, 43, 49, 50, 44, 59, 322, 101, 310, 311),
    *(62, 200, 234, 425, 321, 434, 438, 323, 165, 272, 308),
)
_AARCH64 = (
    *(198, 199, 203, 202, 200, 201, 206, 221, 281, 117, 270, 271),
    *(129, 130, 131, 425, 280, 434, 438, 282, 40, 97, 268),
)
_OPENING = {"x86_64": (2, 85, 257, 437, 304), "aarch64": (56, 437, 265)}
"""open, creat, openat, openat2, open_by_handle_at."""
_ARCHITECTURES = {"x86_64": (0xC000_003E, _X86_64, 317), "aarch64": (0xC000_00B7, _AARCH64, 277)}
"""The number of each architecture, those of the calls that are refused there, and that of ``seccomp``."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def confine(*, opens_files: bool = True) -> bool:
    """Refuse the network, other programs and other processes to all threads of this process from now on; without
    ``opens_files`` also files that it does not have yet. Returns False where the kernel, or the processor, is not known
    to have such a filter."""
    known = _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    if known is None:
        return False
    architecture, refused, seccomp = known
    code = _filter(architecture, refused if opens_files else (*refused, *_OPENING[platform.machine()]))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    # For all threads: numpy has started some of its own when it was imported.
    arguments = map(ctypes.c_long, (seccomp, _SECCOMP_SET_MODE_FILTER, _ALL_THREADS, ctypes.addressof(program)))
    return bool(libc.syscall(*arguments) == 0)


def _filter(architecture: int, refused: tuple[int, ...]) -> bytes:
    """Return the instructions: what is not refused is allowed, and another architecture is refused."""
    end = len(refused) + 1  # jumps count from the next instruction; the last two allow and refuse
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 0, end + 2, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, end, 0, _X32_BIT),
        *((_EQUAL, len(refused) - index, 0, number) for index, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *each) for each in instructions)
