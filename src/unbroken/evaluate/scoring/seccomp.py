"""The system calls that generated code may not make, as a filter for the kernel; made by libseccomp.

What is denied opens doors that limits do not see (user namespaces, in which mounts can be made; io_uring; keyrings),
holds memory that no process shows (memfds, System V segments), looks into other processes, or reaches beyond the
network's namespace (vsock). Everything else is allowed: the filter is a second wall, the namespaces are the first.

libseccomp is called through ctypes: it is a part of every Linux with systemd, and its Python binding is seldom there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_EQ, _GT, _MASKED_EQ = 4, 6, 7

DENIED: dict[str, int] = {
    **dict.fromkeys(
        (
            "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick",
            "move_mount", "open_tree", "mount_setattr", "open_by_handle_at", "name_to_handle_at",
            "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp",
            "add_key", "request_key", "keyctl", "bpf", "perf_event_open", "lookup_dcookie", "syslog", "acct", "quotactl",
            "swapon", "swapoff", "reboot", "kexec_load", "kexec_file_load", "init_module", "finit_module",
            "delete_module", "iopl", "ioperm", "vhangup", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex",
        ),
        errno.EPERM,
    ),
    # These say that the kernel lacks them, so that libraries take their other way.
    **dict.fromkeys(
        (
            "clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "userfaultfd", "memfd_create",
            "memfd_secret", "shmget", "msgget", "semget",
        ),
        errno.ENOSYS,
    ),
}  # fmt: skip
"""System call -> the error that it gives. clone3 has its flags in memory, where a filter cannot see them; without it
the C library uses clone."""
NEW_SPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags of clone: mount, cgroup, UTS, IPC, user, process and network namespaces."""
FAMILIES = (1, 2, 10, 16)
"""Address families of sockets: Unix, IPv4, IPv6 and netlink. The namespace holds these; vsock it does not."""
_BUFFERS = (7, 8, 32, 33)
"""Options of SOL_SOCKET that make its buffers larger: SO_SNDBUF, SO_RCVBUF, and what root may do."""
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


class _Compare(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@cache
def seccomp_filter() -> bytes | str:
    """The filter as the kernel takes it, or why there is none."""
    if not os.path.exists("/proc/sys/kernel/seccomp"):
        return "the kernel has no seccomp"
    try:
        lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        return "libseccomp is not installed (apt-get install libseccomp2)"
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not context:
        return "libseccomp cannot make a filter"
    try:
        for name, error in DENIED.items():
            _deny(lib, context, name, error)
        for flag in NEW_SPACES:
            _deny(lib, context, "clone", errno.EPERM, _Compare(0, _MASKED_EQ, flag, flag))
        for family in range(FAMILIES[-1]):
            if family not in FAMILIES:
                _deny(lib, context, "socket", errno.EAFNOSUPPORT, _Compare(0, _EQ, family, 0))
        _deny(lib, context, "socket", errno.EAFNOSUPPORT, _Compare(0, _GT, FAMILIES[-1], 0))
        for option in _BUFFERS:  # as if it had been done: sockets hold what the system's default lets them
            _deny(lib, context, "setsockopt", 0, _Compare(1, _EQ, 1, 0), _Compare(2, _EQ, option, 0))
        for request in (_TIOCSTI, _TIOCLINUX):
            _deny(lib, context, "ioctl", errno.EPERM, _Compare(1, _MASKED_EQ, 0xFFFFFFFF, request))
        return _export(lib, context)
    except OSError as e:
        return f"libseccomp: {e.strerror}"
    finally:
        lib.seccomp_release(context)


def _deny(lib: ctypes.CDLL, context: ctypes.c_void_p, name: str, error: int, *when: _Compare) -> None:
    number = lib.seccomp_syscall_resolve_name(name.encode())
    if number == -1:
        return  # newer than this libseccomp, or not of this processor
    compare = (_Compare * max(1, len(when)))(*when)
    result = lib.seccomp_rule_add_array(context, ctypes.c_uint32(_ERRNO | error), number, len(when), compare)
    if result not in (0, -errno.EDOM):  # EDOM: this processor has no such call
        raise OSError(-result, f"{name}: {os.strerror(-result)}")


def _export(lib: ctypes.CDLL, context: ctypes.c_void_p) -> bytes:
    fd = os.memfd_create("filter", os.MFD_CLOEXEC)
    try:
        result = lib.seccomp_export_bpf(context, fd)
        if result != 0:
            raise OSError(-result, os.strerror(-result))
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
