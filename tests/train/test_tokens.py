"""Text becomes tokens once, whole, whatever starts or dies meanwhile."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unbroken.errors import InputError
from unbroken.train.corpus.tokens import find_corpus, open_tokens


def text(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    return folder


def test_tokens_are_the_bytes_in_the_order_of_names(tmp_path: Path) -> None:
    t = open_tokens(str(text(tmp_path / "text", b="world", a="hello")), tmp_path / "cache")
    assert bytes(t.map()) == b"hello\0world\0"
    assert t.fingerprint == hashlib.sha256(b"hello\0world\0").hexdigest()
    assert t.count == 12


def test_changed_text_gets_tokens_of_its_own(tmp_path: Path) -> None:
    folder = text(tmp_path / "text", a="one")
    first = open_tokens(str(folder), tmp_path)
    text(folder, a="two, longer")
    second = open_tokens(str(folder), tmp_path)
    assert first.fingerprint != second.fingerprint and first.path != second.path
    assert bytes(first.map()) == b"one\0"


@pytest.mark.parametrize("damage", ["short", "empty", "magic", "header"])
def test_a_damaged_cache_is_written_again(tmp_path: Path, damage: str) -> None:
    folder = text(tmp_path / "text", a="x" * 10_000)
    t = open_tokens(str(folder), tmp_path)
    whole = t.path.read_bytes()
    bad = {
        "short": whole[:-1],
        "empty": b"",
        "magic": b"?" + whole[1:],
        "header": whole[:20] + b"}" + whole[21:],
    }
    t.path.write_bytes(bad[damage])
    again = open_tokens(str(folder), tmp_path)
    assert again == t and t.path.read_bytes() == whole


def test_many_processes_at_once_and_one_killed(tmp_path: Path) -> None:
    folder = text(tmp_path / "text", **{f"f{i:03}": str(i) * 20_000 for i in range(120)})
    code = "import sys; from pathlib import Path; from unbroken.train.corpus.tokens import open_tokens; t = open_tokens(sys.argv[1], Path(sys.argv[2])); print(t.fingerprint, len(t.map()))"
    starts = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    starts[0].kill()
    said = {p.communicate()[0] for p in starts[1:]}
    starts[0].communicate()
    assert len(said) == 1 and all(p.returncode == 0 for p in starts[1:])
    files = [p.name for p in (tmp_path / "c").iterdir() if p.suffix == ".bin"]
    assert len(files) == 1


def test_the_standard_library_is_there() -> None:
    corpus = find_corpus("stdlib")
    names = {name for name, _, _ in corpus.files}
    assert "argparse.py" in names and "json/decoder.py" in names
    assert not any(n.startswith(("site-packages/", "test/")) for n in names)


def test_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no text to train on"):
        open_tokens(str(tmp_path / "absent"))
    with pytest.raises(InputError, match="no text files"):
        open_tokens(str(tmp_path))
    if os.geteuid() != 0:
        locked = text(tmp_path / "text", a="x")
        (locked / "a.txt").chmod(0)
        with pytest.raises(InputError, match="cannot be read"):
            open_tokens(str(locked), tmp_path / "c")
    (tmp_path / "file").write_text("x")
    text(tmp_path / "text2", a="y")
    with pytest.raises(InputError, match="cache cannot be written"):
        open_tokens(str(tmp_path / "text2"), tmp_path / "file" / "below")
