"""`unbroken demo`: a mistake in what was asked is one paragraph, and costs no earlier story."""

from __future__ import annotations

from pathlib import Path

import pytest

from unbroken.cli.demo import _MARK
from unbroken.cli.main import dispatch


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What an earlier demo left."""
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / _MARK).touch()
    (folder / "story.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("option", "says"),
    [(["--limit", "soon"], "not a duration"), (["--train", "--device 'cuda"], "--train cannot be split")],
)
def test_a_mistake_leaves_the_earlier_story(
    earlier: Path, option: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["demo", "--dir", str(earlier), *option]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err
    assert (earlier / "story.json").exists()


def test_a_folder_of_something_else_is_not_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert dispatch(["demo", "--dir", str(tmp_path)]) == 2
    assert "not made by a demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_where_the_folder_should_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "demo"):
        assert dispatch(["demo", "--dir", str(folder)]) == 34
        err = capsys.readouterr().err
        assert "cannot be written" in err and "Traceback" not in err
