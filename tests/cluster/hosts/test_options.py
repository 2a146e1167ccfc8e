"""The list of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.cluster.hosts.options import Host, HostsOptions, list_hosts
from unbroken.errors import InputError, UsageError


def test_a_host_a_line_with_what_differs(tmp_path: Path) -> None:
    file = tmp_path / "HOSTS"
    file.write_text("# ours\nnode1\nnode2 address=10.0.0.2 port=2222 user=me python=/x/python  # new\n\n")
    assert list_hosts(HostsOptions(file)) == [
        Host("node1"), Host("node2", "10.0.0.2", 2222, "me", "/x/python"),
    ]  # fmt: skip
    assert list_hosts(HostsOptions(hosts=("a", "b"))) == [Host("a"), Host("b")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host in the list"),
        ("a\nb\na\n", "'a' is there twice"),
        ("-oProxyCommand=x\n", "no name of a host"),
        ("a\nb 10.0.0.2\n", r"found '10.0.0.2' \(.*line 2\)"),
        ("a port=ssh\n", "no port ssh"),
    ],
)
def test_what_is_no_list_is_said_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "HOSTS").write_text(text)
    with pytest.raises(UsageError, match=says):
        list_hosts(HostsOptions(tmp_path / "HOSTS"))


def test_options_that_say_nothing_or_too_much() -> None:
    for wrong in ({}, {"file": Path("x"), "hosts": ("a",)}, {"hosts": ("a",), "port": 1 << 16}):
        with pytest.raises(UsageError):
            HostsOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be read"):
        list_hosts(HostsOptions(Path("/no/such/file")))
