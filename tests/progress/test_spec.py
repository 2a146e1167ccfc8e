"""run.toml: round trip, unknown keys, settings that do not nest, and whose command it is."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.errors import InputError, RunDirMismatch, UnbrokenError, UnknownKey, UsageError
from unbroken.progress import Budgets, RunDir, RunSpec, Timeouts, check_same, read_spec, write_spec
from unbroken.units import Bytes, Duration

SPEC = RunSpec(("train.py", "--lr", "3e-4"), "abc123", nodes=2, nproc=4, spares=1)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def test_round_trip(run_dir: RunDir) -> None:
    spec = replace(
        SPEC, host_memory=Bytes("64GiB"), timeouts=Timeouts(hang=Duration("90s"), lease=Duration("2.5s")),
        budgets=Budgets(failure=0),
    )  # fmt: skip
    write_spec(run_dir, spec)
    assert read_spec(run_dir.spec) == spec
    write_spec(run_dir, read_spec(run_dir.spec))
    assert read_spec(run_dir.spec) == spec


words = st.text(st.characters(blacklist_categories=("Cs",)), max_size=30)


@given(
    st.lists(words, min_size=1, max_size=5), st.integers(1, 10**6), st.integers(1, 64), st.integers(0, 99),
    st.floats(2, 1e6), st.integers(0, 2**50), st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_round_trip_of_anything(
    tmp_path_factory: pytest.TempPathFactory, command: list[str], nodes: int, nproc: int, spares: int, lease: float,
    memory: int, budget: int,
) -> None:  # fmt: skip
    run_dir = RunDir(tmp_path_factory.mktemp("spec"))
    spec = RunSpec(
        tuple(command), "x", nodes, nproc, spares, host_memory=Bytes(memory),
        timeouts=Timeouts(lease=Duration(lease)), budgets=Budgets(hang=budget),
    )  # fmt: skip
    write_spec(run_dir, spec)
    assert read_spec(run_dir.spec) == spec


@pytest.mark.parametrize("word", ["\x7f", "\x00", "a\nb\r", "😀", "\\u0041", '"', "\u2028", "é"])
def test_awkward_arguments(run_dir: RunDir, word: str) -> None:
    write_spec(run_dir, replace(SPEC, command=("train.py", word)))
    assert read_spec(run_dir.spec).command == ("train.py", word)


def test_an_argument_that_is_no_text(run_dir: RunDir) -> None:
    with pytest.raises(UsageError, match="no UTF-8 text"):
        write_spec(run_dir, replace(SPEC, command=("train.py", b"\xff".decode(errors="surrogateescape"))))
    assert not run_dir.spec.exists()


def test_every_setting_is_in_the_file(run_dir: RunDir) -> None:
    write_spec(run_dir, SPEC)
    text = run_dir.spec.read_text()
    for kind in (RunSpec, Timeouts, Budgets):
        for f in fields(kind):
            assert f"{f.name} =" in text or f"[{f.name}]" in text


@pytest.mark.parametrize(
    ("old", "new", "nearest"),
    [
        ("spares =", "spare =", "spares"),
        ("[timeouts]", "[timeout]", "timeouts"),
        ('hang = "', 'hangs = "', "hang"),
        ("node_loss", "nodeloss", "node_loss"),
    ],
)
def test_unknown_key_names_the_nearest(run_dir: RunDir, old: str, new: str, nearest: str) -> None:
    write_spec(run_dir, SPEC)
    run_dir.spec.write_text(run_dir.spec.read_text().replace(old, new, 1))
    with pytest.raises(UnknownKey, match=f"Did you mean '{nearest}'") as e:
        read_spec(run_dir.spec)
    assert e.value.nearest == nearest and str(run_dir.spec) in str(e.value)


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", UsageError, "'command' is missing"),
        ("command = ['a']", UsageError, "'run_id' is missing"),
        ("command = 'a'\nrun_id = 'x'", UsageError, "list of strings"),
        ("command = []\nrun_id = 'x'", UsageError, "list of strings"),
        ("command = [1]\nrun_id = 'x'", UsageError, "list of strings"),
        ("command = ['a']\nrun_id = 'x'\nnodes = 0", UsageError, "'nodes' must be a whole number"),
        ("command = ['a']\nrun_id = 'x'\nnodes = 1.5", UsageError, "'nodes' must be a whole number"),
        ("command = ['a']\nrun_id = 'x'\nnproc = true", UsageError, "'nproc' must be a whole number"),
        ("command = ['a']\nrun_id = 'x'\nspares = -1", UsageError, "'spares' must be a whole number"),
        ("command = ['a']\nrun_id = 'x'\nhost_memory = 'lots'", UsageError, "not a size"),
        ("command = ['a']\nrun_id = 'x'\ntimeouts = 3", UsageError, "'timeouts' must be a table"),
        ("command = ['a']\nrun_id = 'x'\n[timeouts]\nhang = 'soon'", UsageError, "not a duration"),
        ("command = ['a']\nrun_id = 'x'\n[timeouts]\nhang = '-3s'", UsageError, "not a duration"),
        ("command = ['a']\nrun_id = 'x'\n[timeouts]\nhang = 0", UsageError, "above zero"),
        ("command = ['a']\nrun_id = 'x'\n[timeouts]\nhang = [1]", UsageError, "hang"),
        ("command = ['a']\nrun_id = 'x'\n[budgets]\nhang = -1", UsageError, "whole number"),
        ("command = ['a']\nrun_id = 7", UsageError, "run_id"),
        ("command = ['a'", InputError, "cannot be read"),
        ("\x00", InputError, "cannot be read"),
    ],
)
def test_bad_files(run_dir: RunDir, text: str, error: type[Exception], says: str) -> None:
    run_dir.spec.write_text(text)
    with pytest.raises(error, match=says):
        read_spec(run_dir.spec)


def test_bytes_that_are_no_text(run_dir: RunDir) -> None:
    run_dir.spec.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_spec(run_dir.spec)


def test_missing_file_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run directory"):
        read_spec(tmp_path / "run.toml")
    (tmp_path / "file").touch()
    with pytest.raises(InputError):
        read_spec(tmp_path / "file" / "run.toml")


@pytest.mark.parametrize(
    "wrong",
    [
        {"suspect": 61, "hang": 60}, {"hang": 1801}, {"lease": 1.9}, {"stop": 0}, {"idle": -1},
        {"evaluating": float("nan")},
    ],
)  # fmt: skip
def test_timeouts_must_nest(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Timeouts(**{k: Duration(v) for k, v in wrong.items()})


def test_same_run(run_dir: RunDir) -> None:
    check_same(SPEC, replace(SPEC, run_id="other", spares=3, timeouts=Timeouts(hang=Duration(9))), run_dir)
    with pytest.raises(RunDirMismatch) as e:
        check_same(SPEC, replace(SPEC, command=("other.py",), nodes=3), run_dir)
    text = str(e.value)
    assert "command was train.py --lr 3e-4, now other.py" in text and "nodes was 2, now 3" in text
    assert "nproc" not in text and str(run_dir.path) in text
    assert e.value.exit_code == 12


def test_every_path_lies_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    d = RunDir("relative")
    assert d.path == tmp_path / "relative"
    for path in (
        d.spec, d.token, d.term(1), d.journal(1), d.attempt(1), d.rank_log(1, "node-000", 3), d.agent_log("n"),
        d.steps(1), d.checkpoints, d.incident(1), d.evidence(1), d.report,
    ):  # fmt: skip
        assert d.path in path.parents
    assert d.attempt_numbers() == []
    d.create()
    d.create()
    for name in ("0002", "0001", "12345", "x", "1"):
        (d.attempts / name).mkdir()
    assert d.attempt_numbers() == [1, 2, 12345]


def test_every_edit_of_run_toml_is_answered_with_its_file(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    write_spec(run_dir, RunSpec(("train.py",), "r"))
    lines = run_dir.spec.read_text().splitlines()
    refused = 0
    for i, line in enumerate(lines):
        key = line.split("=")[0]
        for new in (
            "",
            "nonsense",
            "x = 1",
            f"{key} = [1]",
            f"{key} = 'a'",
            f"{key} = {{a = 1}}",
            f"{key} = -1",
        ):
            run_dir.spec.write_text("\n".join([*lines[:i], new, *lines[i + 1 :]]))
            try:
                read_spec(run_dir.spec)
            except UnbrokenError as e:
                refused += 1
                assert str(run_dir.spec) in str(e), (line, new, e)
    assert refused > 50
