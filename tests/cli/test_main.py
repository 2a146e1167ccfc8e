"""The command itself: help, unknown commands, the error envelope, exit codes, a reader that goes away."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbroken.cli import main as cli
from unbroken.errors import DoesNotFit, Exit, RunStopped
from unbroken.version import __version__


def unbroken(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unbroken", *args],
        capture_output=True,
        text=True,
        check=False,
        input=stdin,
        timeout=60,
    )


def test_the_process_itself() -> None:
    done = unbroken("--version")
    assert (done.returncode, done.stdout) == (0, f"unbroken {__version__}\n")
    done = unbroken("stauts", "somewhere")
    assert done.returncode == 2
    assert (
        done.stderr
        == "unbroken: there is no command 'stauts'. Did you mean 'status'? `unbroken --help` lists them.\n"
    )


def test_help_names_every_command_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--help"], ["-h"], ["help"]):
        assert cli.dispatch(args) == 0
        out = capsys.readouterr().out
        for name, line in cli.available().items():
            assert name in out and line in out
    assert cli.dispatch([]) == 2
    assert "Usage" in capsys.readouterr().out


def test_every_command_explains_itself_without_torch() -> None:
    """In one fresh process for all of them: what one command imports, the next one has."""
    code = """
import contextlib, io, sys
from unbroken.cli.main import available, dispatch
for name in available():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = dispatch([name, '--help'])
    if code or name not in said.getvalue() or 'torch' in sys.modules:
        sys.exit(f"{name}: code {code}, torch {'torch' in sys.modules}")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr


def test_commands_and_files_are_the_same() -> None:
    """A command without a file is not offered; a file without a line of help is a mistake."""
    folder = cli.__file__.rsplit("/", 1)[0]
    files = {p.stem for p in Path(folder).glob("*.py")} - {"__init__", "main"}
    files |= {p.name for p in Path(folder).iterdir() if (p / "__init__.py").exists()} - {*cli.FOLDERS}
    for name, commands in cli.FOLDERS.items():
        assert {p.stem for p in Path(folder, name).glob("*.py")} - {"__init__"} == {*commands}
        files |= {*commands}
    private = {f for f in files if f.startswith("_")}
    assert files - private == set(cli.available())
    for name in cli.available():
        assert hasattr(importlib.import_module(cli.name_module(name)), "app")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A command 'fake' that does what the test puts into `does`."""
    box = SimpleNamespace(does=lambda args: None, app=None)
    box.app = lambda args, prog_name, standalone_mode: box.does(args)
    monkeypatch.setattr(cli, "available", lambda: {"fake": "a fake"})
    monkeypatch.setitem(sys.modules, "unbroken.cli.fake", box)
    return box


def raising(error: BaseException) -> object:
    def does(args: list[str]) -> None:
        raise error

    return does


def test_errors_become_a_paragraph_and_their_code(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.does = raising(DoesNotFit("too many ranks", where="this machine", hint="Use fewer"))
    assert cli.dispatch(["fake"]) == 14
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "unbroken fake: too many ranks (this machine). Use fewer.\n")


def test_the_envelope_with_json(command: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    error = RunStopped("it failed", where="step 3", hint="Fix it")
    command.does = raising(error)
    assert cli.dispatch(["fake", "--json"]) == 10
    out = capsys.readouterr()
    assert json.loads(out.out) == {
        "error": {
            "kind": "RunStopped",
            "what": "it failed",
            "where": "step 3",
            "todo": "Fix it",
            "exit_code": 10,
        }
    }
    assert "it failed" in out.err
    # What stands behind '--' belongs to the user's script.
    cli.dispatch(["fake", "--", "train.py", "--json"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(0), 0), (SystemExit(None), 0), (SystemExit(7), 7), (SystemExit("words"), 1),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
    ],
)  # fmt: skip
def test_other_ends(command: SimpleNamespace, error: BaseException, code: int) -> None:
    command.does = raising(error)
    assert cli.dispatch(["fake"]) == code


def test_a_commands_own_code(command: SimpleNamespace) -> None:
    command.does = lambda args: 21
    assert cli.dispatch(["fake"]) == 21
    command.does = lambda args: None
    assert cli.dispatch(["fake"]) == 0


def test_a_defect_of_ours_says_so(command: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    command.does = raising(ZeroDivisionError("division by zero"))
    assert cli.dispatch(["fake"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err and "this is a defect of unbroken" in err and "ZeroDivisionError" in err


def test_a_library_that_is_missing_is_said_in_one_line(
    command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on an image with PyTorch alone, from a source checkout; a module that we have no requirement for is our defect."""
    command.does = raising(ModuleNotFoundError("No module named 'xxhash'", name="xxhash"))
    assert cli.dispatch(["fake"]) == 4
    told = capsys.readouterr().err
    assert told.startswith(
        "unbroken fake: this command needs xxhash, which is not installed. Install it with: "
    )
    assert told.count("\n") == 1
    command.does = raising(ModuleNotFoundError("No module named 'something'", name="something"))
    assert cli.dispatch(["fake"]) == 70


def test_without_typer_every_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from unbroken.cli.main import main; main(sys.argv[1:])"
    for name in cli.available():
        done = subprocess.run(
            [sys.executable, "-c", code, name, "x"], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
        assert f"unbroken {name}: this command needs typer" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`unbroken ... | head -1`: the pipe breaks at the exit at the latest, and nobody hears of it."""
    code = "import sys; sys.modules['unbroken.cli.fake'] = type(sys)('fake'); m = sys.modules['unbroken.cli.fake']\n" \
        "from unbroken.cli import main as cli\n" \
        "cli.available = lambda: {'fake': ''}\n" \
        "def app(args, prog_name, standalone_mode):\n    for i in range(10**6): print('line', i)\n" \
        "m.app = app\nsys.exit(cli.dispatch(['fake']))\n"  # fmt: skip
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    assert writer.stdout.readline() == b"line 0\n"
    writer.stdout.close()
    assert writer.stderr.read() == b""
    assert writer.wait(30) == 0
    writer.stderr.close()


@pytest.mark.parametrize(
    "args",
    [
        ["status"], ["report"], ["status", "a", "b"], ["run", "--nodes", "x", "--", "train.py"], ["run", "--nodes", "0", "--", "train.py"],
        ["run", "--no-such-option", "--", "train.py"], ["run", "--hang-after", "soon", "--", "true"],
        ["run", "--host-memory", "lots", "--", "true"], ["run"],
    ],
)  # fmt: skip
def test_wrong_usage_is_two_and_no_traceback(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(args) == 2
    err = capsys.readouterr().err
    assert err and "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("checkpoint ls --jsn --json", "--jsn"),
        ("eval plan --json", "suite"),
        ("eval pln --json", "plan"),
        ("evl --json", "eval"),
    ],
)
def test_a_wrong_command_line_is_one_json_object_too(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(line.split()) == 2
    out = capsys.readouterr()
    error = json.loads(out.out)["error"]
    assert error["kind"] == "UsageError" and error["exit_code"] == 2 and says in error["what"] and out.err


@pytest.mark.parametrize("wrong", [["--model", "8b"], ["--gpus", "x"], ["--gpus", "8", "--tensor", "3"]])
def test_an_error_of_train_plan_is_in_the_envelope_too(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(["train", "plan", *wrong, "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error["exit_code"] == 2 and error["what"] in shown.err
    assert cli.dispatch(["train", "plan", *wrong]) == 2
    assert capsys.readouterr().out == ""
