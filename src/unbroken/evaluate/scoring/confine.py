"""The first program inside the sandbox: limits, another user, no way back; then the command itself.

Run by its path, with no package around it and no site-packages: it must start in milliseconds and import nothing
that could be tampered with. Where bubblewrap is missing it makes the namespaces itself ("mounts" is in the plan). The
plan comes through the descriptor that its first argument names: a command line could be read by what it starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import sys

MYPY = False  # typing is not imported when this runs: every millisecond counts
if MYPY:
    from typing import Any

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MS_REMOUNT = (
    1,
    2,
    4,
    4096,
    16384,
    1 << 18,
    32,
)

_libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> None:
    with open(int(argv[0]), "rb") as told:
        plan = json.load(told)
    if "mounts" in plan:
        _namespaces(plan)
    home = plan["home"]
    shutil.copytree(plan["inputs"], home, dirs_exist_ok=True, copy_function=shutil.copyfile)
    os.chdir(home)
    if plan["user"] is not None:
        for folder, folders, files in os.walk(home):
            for name in [folder, *(os.path.join(folder, n) for n in [*folders, *files])]:
                os.chmod(name, 0o777 if os.path.isdir(name) else 0o666)
        os.setgroups([])
        os.setresgid(plan["user"], plan["user"], plan["user"])
        os.setresuid(plan["user"], plan["user"], plan["user"])
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    _limits(plan["limits"])
    os.umask(0o022)
    # From here on whoever started us takes us with it when it dies; had it died before we could arrange that, nobody
    # answers now.
    os.write(plan["ready"], b"r")
    if os.read(plan["go"], 1) != b"g":
        sys.exit(125)
    os.closerange(3, 1 << 20)  # ours and whatever was inherited: only the three standard ones stay
    os.execvpe(argv[1], argv[1:], plan["env"])


def _limits(limits: dict[str, Any]) -> None:
    seconds = max(1, round(limits["cpu_s"]))
    for what, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, limits["address_space"], limits["address_space"]),
        (resource.RLIMIT_NPROC, limits["processes"], limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["scratch"], limits["scratch"]),
        (resource.RLIMIT_NOFILE, limits["files"], limits["files"]),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ):
        _, most = resource.getrlimit(what)
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(what, (soft, hard))


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _filter(bpf: str) -> None:
    """The system calls that this process and all that it starts may make; for ever."""
    if not bpf:
        return
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = bytes.fromhex(bpf)
    program = _Program(len(code) // 8, code)
    _check(_libc.prctl(22, 2, ctypes.byref(program), 0, 0), "seccomp")  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _check(result: int, what: str) -> None:
    if result != 0:
        e = ctypes.get_errno()
        raise OSError(e, f"{what}: {os.strerror(e)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    args = [x.encode() if x is not None else None for x in (source, target, kind)]
    _check(_libc.mount(*args, ctypes.c_ulong(flags), data.encode() if data else None), f"mount {target}")


def _namespaces(plan: dict[str, Any]) -> None:
    """New mount, process, network, IPC and host-name spaces, and a root that holds only what the plan names."""
    _libc.prctl(
        1, signal.SIGKILL, 0, 0, 0
    )  # PR_SET_PDEATHSIG: the whole sandbox ends with whoever started it
    uid, gid = os.getuid(), os.getgid()
    spaces = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    # Root makes them as root and later becomes another, real user, whose processes are counted apart; anybody else
    # needs a user space too, in which the only user is themselves, without rights outside.
    if plan["user"] is None:
        _check(_libc.unshare(_NEWUSER | spaces), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
    else:
        _check(_libc.unshare(spaces), "unshare")
    _become_child()
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    size = plan["limits"]["scratch"]
    new = plan["root"]
    _mount("tmpfs", new, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind("/dev/" + name, f"{new}/dev/{name}", readonly=False)
    for place in ("/tmp", "/dev/shm", plan["home"]):
        os.makedirs(new + place, exist_ok=True)
        _mount("tmpfs", new + place, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},mode=1777")
    for path in plan["mounts"]:
        _bind(path, new + path)
    _bind(plan["folder"], new + plan["inputs"])
    os.makedirs(new + "/proc", exist_ok=True)
    try:
        _mount("proc", new + "/proc", "proc", _MS_NOSUID | _MS_NODEV)
    except PermissionError:
        pass  # a container that hides parts of /proc forbids a new one; programs then do without
    else:
        for path in plan["masked"]:
            if os.path.exists(new + path):
                _mount("/dev/null", new + path, None, _MS_BIND)
    os.makedirs(new + "/old", exist_ok=True)
    _check(_libc.pivot_root(new.encode(), (new + "/old").encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", 2), "umount /old")
    os.rmdir("/old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    _libc.sethostname(b"sandbox", 7)
    # Those that wait have rights over the namespaces; nothing that runs here looks into them or calls the kernel as they.
    _filter(plan["filter"])
    # The first process of an id space ignores signals from inside, so the command must not be it.
    _become_child()


def _become_child() -> None:
    """Goes on in a child; the parent waits for it and ends as it did, and whatever is left in its id space with it."""
    child = os.fork()
    if child == 0:
        return
    _libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: neither traced nor read in /proc
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _bind(source: str, target: str, readonly: bool = True) -> None:
    if os.path.islink(source) and os.path.dirname(source) == "/":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)  # /bin -> usr/bin
        return
    if not os.path.exists(source):
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "a").close()
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if not readonly:
        return
    # Recursively: mount_setattr(AT_RECURSIVE, MOUNT_ATTR_RDONLY), Linux 5.12; a plain remount before that.
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
    if (
        _libc.syscall(442, -100, target.encode(), 0x8000, ctypes.byref(attributes), ctypes.sizeof(attributes))
        != 0
    ):
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as e:
        print(f"sandbox: {e}", file=sys.stderr)
        sys.exit(125)
