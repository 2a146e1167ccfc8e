"""The tests stay away from the user's own files, and the guard that says so notices what does not."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

from tests.conftest import touched
from unbroken.diagnose.assist.incident_store import default_path
from unbroken.evaluate.model.sources import memo_folder
from unbroken.evaluate.plan.priors import default_store


def test_what_is_kept_between_runs_lies_in_a_folder_of_the_session() -> None:
    real = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for place in (default_path(), default_store(), memo_folder(), Path.home()):
        assert not place.is_relative_to(real / ".local") and not place.is_relative_to(real / ".cache")
        assert place != real


def test_the_guard_notices_every_file_of_a_user(tmp_path: Path) -> None:
    assert touched(tmp_path) == []
    for place in (".local/state/unbroken/incidents.sqlite", ".local/state/unbroken/eval-priors.json", ".cache/unbroken/model-hashes/x"):  # fmt: skip
        file = tmp_path / place
        file.parent.mkdir(parents=True)
        file.write_text("")
        assert file in touched(tmp_path)
        file.unlink()
        for p in (file.parent, file.parent.parent):
            p.rmdir()


def test_a_suite_that_writes_to_the_home_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(
        "import os\nfrom pathlib import Path\nfrom unbroken.diagnose.assist.incident_store import IncidentStore, default_path\n"
        "def test_x(monkeypatch):\n    monkeypatch.delenv('XDG_STATE_HOME')\n    IncidentStore().incidents()\n"
        "    assert default_path().is_file()\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "UNBROKEN_TEST_HOME"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:kmock", str(tmp_path)],
                          env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert "1 passed" in done.stdout and "wrote to a user's own files" in done.stdout
    assert done.returncode == 1
