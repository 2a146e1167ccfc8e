"""What is asked of a cluster, on a command line and in run.toml."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from unbroken.cluster.options import NoOptions, make_options, parse_choice
from unbroken.errors import UnknownKey, UsageError
from unbroken.progress import ClusterChoice, RunDir, RunSpec, read_spec, write_spec
from unbroken.units import Bytes, Duration


@dataclass(frozen=True)
class Options:
    file: Path | None = None
    hosts: tuple[str, ...] = ()
    port: int = 22
    wait: Duration = Duration("5m")
    memory: Bytes = Bytes(0)
    drain: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise UsageError(f"there is no port {self.port}")


def test_a_choice_is_a_name_with_options() -> None:
    assert parse_choice("local") == ClusterChoice("local")
    assert parse_choice("hosts,file=a=b,drain-it=no") == ClusterChoice(
        "hosts", {"file": "a=b", "drain_it": "no"}
    )
    assert parse_choice("hosts,drain,hosts=a,b,c,port=7").options == {
        "drain": "true", "hosts": "a,b,c", "port": "7",
    }  # fmt: skip
    for text in ("", ",file=x", "hosts,=x", "hosts,a=1,a=2"):
        with pytest.raises(UsageError):
            parse_choice(text)


def test_texts_become_what_the_fields_are() -> None:
    texts = {"file": "HOSTS", "hosts": "a,b", "port": "23", "wait": "1h", "memory": "2GiB", "drain": "yes"}
    wanted = Options(Path("HOSTS"), ("a", "b"), 23, Duration(3600), Bytes(2 << 30), True)
    assert make_options(Options, texts, where="x") == wanted
    assert make_options(Options, {"hosts": ["a", "b"], "port": 23, "drain": True}, where="x") == Options(
        None, ("a", "b"), 23, drain=True
    )


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("hots", "a", "Did you mean 'hosts'"),
        ("port", "many", r"a whole number, found 'many' \(the cluster 'x', option 'port'\)"),
        ("port", "0", "no port 0"),
        ("drain", "perhaps", "yes or no"),
        ("wait", "soon", "option 'wait'"),
        ("port", ["1"], "one value"),
    ],
)
def test_what_makes_no_sense_is_said_with_its_name(key: str, value: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_options(Options, {key: value}, where="the cluster 'x'")


def test_a_cluster_without_options_says_so() -> None:
    with pytest.raises(UsageError, match="no option 'a'"):
        make_options(NoOptions, {"a": "1"}, where="x")
    with pytest.raises(UnknownKey):
        make_options(Options, {"a": "1"}, where="x")


def test_run_toml_keeps_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    spec = RunSpec(
        ("t.py",), "1", cluster=ClusterChoice("hosts", {"hosts": ("a", "b"), "port": 23, "ssh": True})
    )
    write_spec(run_dir, spec)
    assert read_spec(run_dir.spec) == spec
    run_dir.spec.write_text('command = ["t.py"]\nrun_id = "1"\nbackend = "local"\n')
    assert read_spec(run_dir.spec).cluster == ClusterChoice()
    run_dir.spec.write_text('command = ["t.py"]\nrun_id = "1"\n[cluster]\nname = 3\n')
    with pytest.raises(UsageError, match="'name' must be text"):
        read_spec(run_dir.spec)
    run_dir.spec.write_text('command = ["t.py"]\nrun_id = "1"\n[cluster]\nwhat = {a = 1}\n')
    with pytest.raises(UsageError, match="cluster's 'what' must be"):
        read_spec(run_dir.spec)
