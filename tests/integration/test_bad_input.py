"""Each mistake is one paragraph, an exit code of its own, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import SCRIPT, RunUnderTest

pytestmark = pytest.mark.integration
NewRun = Callable[..., RunUnderTest]


def unbroken(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unbroken", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["run", "--", "nowhere.py"], 3, "the script does not exist"),
        (["run", "--", "folder.py"], 3, "the script is a folder"),
        (["run", "--", "no-such-program-anywhere"], 3, "no program or script"),
        (["run", "--nproc", "2"], 2, "no command after '--'"),
        (["run", "--"], 2, "no command after '--'"),
        (["run", "--nproc", "100000", "--", "ok.py"], 14, "Use fewer --nodes or --nproc"),
        (["run", "--hang-after", "soon", "--", "ok.py"], 2, "--hang-after: 'soon' is not a duration"),
        (["run", "--host-memory", "lots", "--", "ok.py"], 2, "--host-memory: 'lots' is not a size"),
        (["run", "--", "-m", "no_such_package"], 3, "no module 'no_such_package'"),
        (["run", "--nproc", "0", "--", "ok.py"], 2, "--nproc"),
    ],
)
def test_wrong_command_line(args: list[str], code: int, says: str, tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('fine')\n")
    (tmp_path / "folder.py").mkdir()
    out = unbroken(*args, cwd=tmp_path)
    assert out.returncode == code, out.stderr
    assert says in out.stderr
    assert "Traceback" not in out.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_script(tmp_path: Path) -> None:
    script = tmp_path / "secret.py"
    script.write_text("pass\n")
    script.chmod(0)
    out = unbroken("run", "--", "secret.py", cwd=tmp_path)
    assert out.returncode == 3 and "cannot be read" in out.stderr


def test_run_directory_of_another_command(new_run: NewRun) -> None:
    run = new_run(steps=3, seconds=0.01).start()
    assert run.wait() == 0
    out = unbroken("run", "--run-dir", "run", "--nproc", "2", "--", "script.py", "4", "0.01", cwd=run.folder)
    assert out.returncode == 12
    assert "nproc was 1, now 2" in out.stderr and "script.py 3 0.01" in out.stderr


@pytest.mark.slow
def test_misspelt_key_in_run_toml_names_the_nearest(new_run: NewRun) -> None:
    run = new_run(steps=3, seconds=0.01).start()
    assert run.wait() == 0
    text = run.run_dir.spec.read_text()
    run.run_dir.spec.write_text(text.replace("hang =", "hnag ="))
    run.start()
    assert run.wait() == 2
    assert "unknown key 'hnag'" in run.output and "Did you mean 'hang'" in run.output
    run.run_dir.spec.write_text(text)


def test_a_folder_with_other_things_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('fine')\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    out = unbroken("run", "--run-dir", "mine", "--", "ok.py", cwd=tmp_path)
    assert out.returncode == 2 and "thesis.tex" in out.stderr
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["thesis.tex"]


@pytest.mark.slow
def test_epoch_file_of_a_newer_version(new_run: NewRun) -> None:
    run = new_run(steps=3, seconds=0.01).start()
    assert run.wait() == 0
    path = run.run_dir.term(1)
    newer = {**json.loads(path.read_text()), "schema": 99}
    path.write_text(json.dumps(newer))
    run.start()
    assert run.wait() == 16
    assert "schema 99" in run.output


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        out = unbroken("run", "--run-dir", str(small / "run"), "--", "script.py", "3", "0.01", cwd=tmp_path)
        assert out.returncode == 34, out.stderr
        assert "free" in out.stderr
    finally:
        subprocess.run(["umount", str(small)], check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting read-only needs root")
def test_read_only_run_directory(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    place = tmp_path / "ro"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("this machine does not let us mount a read-only file system")
    try:
        out = unbroken("run", "--run-dir", str(place / "run"), "--", "script.py", "3", "0.01", cwd=tmp_path)
        assert out.returncode == 34, out.stderr
        assert "cannot be written" in out.stderr
    finally:
        subprocess.run(["umount", str(place)], check=False)
