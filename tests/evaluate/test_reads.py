"""Whatever file the preparation of a task read is changed, the next command answers what depends on it, and only that."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from unbroken.evaluate.contracts import ModelSpec, Report, Suite, Task
from unbroken.evaluate.engines import Slot
from unbroken.evaluate.engines.local import LocalEngine
from unbroken.evaluate.model.locate import beside
from unbroken.evaluate.model.sources import FolderSource
from unbroken.evaluate.preparation import reads
from unbroken.evaluate.preparation.reads_in_code import is_blind
from unbroken.evaluate.result.folder import EvalDir
from unbroken.evaluate.result.journal import events
from unbroken.evaluate.run.coordinator import Coordinator
from unbroken.evaluate.run.job import Job, Launchers
from unbroken.evaluate.run.settings import Settings

FAKE = "unbroken.testing.fake_models:FakeBackend"

INFER = """
import json, os, sqlite3, subprocess, sys
from pathlib import Path
from words import GREETING
from beside import TAIL

ELSEWHERE = Path({elsewhere!r})
LISTED = json.load(open(ELSEWHERE / "names.json"))

def in_a_fork(name):
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.write(into, (ELSEWHERE / name).read_bytes())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(out, 1000).decode()

def rows():
    with open(ELSEWHERE / "rows.txt") as f:
        for line in f:
            yield {{"text": line.strip(), "answer": "a"}}
    yield {{"text": in_a_fork("forked.txt"), "answer": "a"}}
    code = "import os; print(open(os.environ['HERE'] + '/started.txt').read())"
    here = {{**os.environ, "HERE": str(ELSEWHERE)}}
    yield {{"text": subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=here).stdout, "answer": "a"}}
    yield {{"text": subprocess.run(["cat", str(ELSEWHERE / "catted.txt")], capture_output=True, text=True).stdout, "answer": "a"}}
    base = sqlite3.connect(ELSEWHERE / "rows.db")
    yield {{"text": base.execute("select t from r").fetchone()[0], "answer": "a"}}
    for name in sorted(os.listdir(ELSEWHERE / "many")):
        yield {{"text": (ELSEWHERE / "many" / name).read_text(), "answer": "a"}}

def prompt(row):
    return f"{{GREETING}} {{row['text']}} {{TAIL}} {{LISTED}}"
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """Two tasks: one reads in every way that we know, the other one is not touched."""
    away = tmp_path / "elsewhere"
    (away / "many").mkdir(parents=True)
    (away / "names.json").write_text('["n"]')
    (away / "rows.txt").write_text("one\ntwo\n")
    for name in ("forked.txt", "started.txt", "catted.txt", "many/a.txt"):
        (away / name).write_text(f"in {name}")
    with sqlite3.connect(away / "rows.db") as base:
        base.execute("create table r (t)")
        base.execute("insert into r values ('from a base')")
    base.close()
    for name in ("busy", "idle"):
        folder = tmp_path / "suite" / name
        folder.mkdir(parents=True)
        (folder / "words.py").write_text(f"GREETING = 'hello {name}'\n")
        (folder / "score.py").write_text("def score(row, output):\n    return row['answer'] in output\n")
    (tmp_path / "suite/busy/beside.py").write_text("TAIL = 'tail'\n")
    (tmp_path / "suite/busy/infer.py").write_text(INFER.format(elsewhere=str(away)))
    idle = tmp_path / "suite/idle"
    (idle / "infer.py").write_text(
        "from words import GREETING\n\ndef prompt(row):\n    return GREETING + row['q']\n"
    )
    (idle / "data.jsonl").write_text(
        "".join(json.dumps({"q": f"q{i}", "answer": ""}) + "\n" for i in range(4))
    )
    tasks = tuple(Task(n, "plain") for n in ("busy", "idle"))
    return Suite("s", tasks, folder=str(tmp_path / "suite"))


def run(tmp_path: Path, suite: Suite) -> Report:
    folder = EvalDir(tmp_path / "suite" / "out")  # inside the suite's folder, as users have it
    spec = ModelSpec("fake", FAKE, block=1)
    settings = Settings(slots=(Slot("w0"),), cpu_workers=1, prepare_workers=1, beat_s=0.2)
    launchers = Launchers(LocalEngine(folder.root / "logs", threads=1))
    return Coordinator(Job(suite, spec, folder), launchers, settings).run()


def asked(report: Report) -> dict[str, int]:
    """Blocks (of one sample each) that were answered in this command."""
    found: dict[str, int] = {}
    for t in report.trials:
        found[t.task] = found.get(t.task, 0) + len(t.blocks)
    return found


def fresh(tmp_path: Path, suite: Suite) -> tuple[dict[str, int], Report]:
    """What this command asked (the report keeps the times of an earlier one where it asked nothing)."""
    before = len(events(tmp_path / "suite/out/journal.jsonl"))
    report = run(tmp_path, suite)
    new = events(tmp_path / "suite/out/journal.jsonl")[before:]
    found: dict[str, int] = {}
    for e in new:
        if e["event"] == "trial":
            found[e["task"]] = found.get(e["task"], 0) + len(e["blocks"])
    return found, report


def replace_text(path: Path, old: str, new: str) -> Callable[[], None]:
    return lambda: (path.write_text(path.read_text().replace(old, new)), None)[1]


def in_place(path: Path, old: str, new: str) -> Callable[[], None]:
    """Same size, same time of change."""

    def change() -> None:
        assert len(old) == len(new)
        st = path.stat()
        replace_text(path, old, new)()
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

    return change


def changes(tmp_path: Path) -> list[tuple[str, Callable[[], None], int]]:
    """(name, a change, blocks of the busy task that depend on it)."""
    away, busy = tmp_path / "elsewhere", tmp_path / "suite/busy"

    def in_the_base() -> None:
        base = sqlite3.connect(away / "rows.db")
        base.execute("update r set t = 'of a base'")
        base.commit()
        base.close()

    def another() -> None:
        (away / "many/b.txt").write_text("another")

    return [
        ("rows of rows()", in_place(away / "rows.txt", "one", "eno"), 1),
        ("read in a fork", replace_text(away / "forked.txt", "in", "within"), 1),
        ("read by another Python", replace_text(away / "started.txt", "in", "within"), 1),
        ("read by another program", in_place(away / "catted.txt", "in", "at"), 1),
        ("a data base", in_the_base, 1),
        ("a file more in a folder", another, 1),
        ("read at import", replace_text(away / "names.json", "n", "m"), 8),
        ("a module beside", in_place(busy / "words.py", "hello", "holla"), 8),
        ("another module beside", replace_text(busy / "beside.py", "tail", "a tail"), 8),
        ("infer.py", replace_text(busy / "infer.py", "LISTED}", "LISTED}!"), 8),
        ("only touched", lambda: os.utime(away / "rows.txt"), 0),
        ("score.py", replace_text(busy / "score.py", "in output", "in output  # so it is"), 0),
    ]


@pytest.mark.slow
def test_what_preparation_read_is_noticed_and_only_what_depends_on_it_is_asked(
    tmp_path: Path, suite: Suite
) -> None:
    first = run(tmp_path, suite)
    assert asked(first) == {"busy": 7, "idle": 4} and not first.errors
    for name, change, expected in changes(tmp_path):
        change()
        found, report = fresh(tmp_path, suite)
        assert found == ({"busy": expected} if expected else {}), name
        assert not report.errors
        assert fresh(tmp_path, suite)[0] == {}, name


def test_all_that_preparation_read_is_noticed(tmp_path: Path, suite: Suite) -> None:
    """As above, several changes at once."""
    first = run(tmp_path, suite)
    assert asked(first) == {"busy": 7, "idle": 4} and not first.errors
    known = {name: change for name, change, _ in changes(tmp_path)}
    single = [name for name, _, blocks in changes(tmp_path) if blocks == 1]
    for name in single:
        known[name]()
    assert fresh(tmp_path, suite)[0] == {"busy": len(single)}
    known["a module beside"]()
    assert fresh(tmp_path, suite)[0] == {"busy": 8}
    known["only touched"]()
    assert fresh(tmp_path, suite)[0] == {}


@pytest.mark.slow
def test_what_is_held_right_is_scored_again_without_asking(tmp_path: Path, suite: Suite) -> None:
    before = {s.task: s.metrics[0].value for s in run(tmp_path, suite).scores}
    data = tmp_path / "suite/idle/data.jsonl"
    data.write_text(data.read_text().replace('"answer": ""', '"answer": "no such words"'))
    found, report = fresh(tmp_path, suite)
    after = {s.task: s.metrics[0].value for s in report.scores}
    assert found == {} and after["idle"] == 0.0 != before["idle"] and after["busy"] == before["busy"]
    score = tmp_path / "suite/idle/score.py"
    score.write_text("def score(row, output):\n    return 1.0\n")
    found, report = fresh(tmp_path, suite)
    assert found == {} and {s.task: s.metrics[0].value for s in report.scores}["idle"] == 1.0


@pytest.mark.slow
def test_what_c_code_reads_is_found_by_its_name(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("a.parquet", "b.parquet", "c.parquet", "d.txt"):
        (data / name).write_text(name)
    code = tmp_path / "infer.py"
    code.write_text(
        f"from pathlib import Path\nHERE = Path(__file__).parent / 'data'\nA = HERE / 'a.parquet'\n"
        f"SQL = 'select * from \"{data}/b.parquet\"\\nlimit 3'\nC = f'{{HERE}}/c.parquet'\n"
    )
    with reads.recording() as recorder:
        exec(compile(code.read_text(), str(code), "exec"), {"__file__": str(code)})
        found = recorder.reads()
    assert {Path(p).name for p in found if str(data) in p} == {"a.parquet", "b.parquet", "c.parquet"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "blind"),
    [
        ("import json\nX = json.load(open('a.json'))", False),
        ("import pandas as pd, numpy\nfrom helper import x", False),
        ("from pathlib import Path\nX = Path('a').read_text() if Path('a').exists() else ''", True),
        ("import os\nX = os.readlink('a')", True),
        ("from os.path import getsize", True),
        ("import subprocess", True),
        ("import polars", True),
        ("def rows():\n    import duckdb.functional", True),
        ("X = __import__('h5py')", True),
        ("import importlib\nX = importlib.import_module('lmdb')", True),
        ("import os\nX = os.environ['SPLIT']", True),
        ("import os\nX = os.path.expandvars('$SPLIT')", True),
        ("import os\nX = os.access('a', os.R_OK)", True),
        ("import shelve\nX = dict(shelve.open('a'))", True),
        ("import pandas as pd\nX = pd.read_parquet(name)", True),
        ("from pandas import read_orc", True),
        ("import sqlite3\nsqlite3.connect('a').execute('ATTACH DATABASE ? AS b', [name])", True),
        ("import pandas as pd\nX = pd.read_csv('a.csv')", False),
        ("not python", False),
    ],
)
def test_code_that_learns_otherwise_than_from_files_is_prepared_anew(
    tmp_path: Path, code: str, blind: bool
) -> None:
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "infer.py").write_text(code)
    assert is_blind(str(tmp_path / "infer.py")) is blind
    assert not reads.unchanged({reads.BLIND: [reads.BLIND]})


@pytest.mark.slow
def test_files_in_odd_places_and_those_that_the_task_writes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path.parent))
    (tmp_path / "uv.lock").write_text("a")
    (tmp_path / "many").mkdir()
    kept = tmp_path / "kept.json"
    kept.write_text("1")
    with reads.recording(spool=None, growing=str(tmp_path / "out")) as recorder:
        (tmp_path / "uv.lock").read_text()
        os.listdir(tmp_path / "many")
        kept.read_text()
        kept.write_text("12")
        found = recorder.reads(blind=False)
    assert reads.unchanged(found) and str(tmp_path / "uv.lock") in found, "what it wrote itself is no change"
    for change in (
        lambda: (tmp_path / "uv.lock").write_text("b"),
        lambda: (tmp_path / "many" / "x").touch(),
        lambda: kept.write_text("123"),
    ):
        change()
        assert not reads.unchanged(found)
        found = {path: reads.stamp(path) for path in found}


READINGS: dict[str, Callable[[Path], object]] = {
    "in both directions": lambda p: os.read(os.open(p, os.O_RDWR), 9),
    "at the end too": lambda p: open(p, "a+").read(),  # noqa: SIM115
    "over": lambda p: open(p, "r+").read(),  # noqa: SIM115
    "mapped": lambda p: mmap.mmap(os.open(p, os.O_RDONLY), 0, prot=mmap.PROT_READ)[:],
    "by a link": lambda p: p.with_name("link").read_text(),
    "in a folder of a linked name": lambda p: (p.parent / "linked" / p.name).read_text(),
    "by another's opener": lambda p: open(p, opener=lambda f, m: os.open(f, m)).read(),  # noqa: SIM115
}


# Each takes seconds: a few kinds are always looked at, the others by make test-all.
@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(k, marks=() if n % 4 == 0 else pytest.mark.slow) for n, k in enumerate(READINGS)]
)
def test_however_a_file_is_opened_its_change_is_noticed(tmp_path: Path, how: str) -> None:
    file = tmp_path / "data" / "a.txt"
    file.parent.mkdir()
    file.write_text("abc")
    (file.parent / "link").symlink_to("a.txt")
    (file.parent / "linked").symlink_to(".")
    with reads.recording() as recorder:
        READINGS[how](file)
        found = recorder.reads(blind=False)
    assert reads.unchanged(found)
    if "link" in how:  # switched to another file of the same size
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "a.txt").write_text("abc")
        link = file.parent / ("link" if how == "by a link" else "linked")
        link.unlink()
        link.symlink_to(tmp_path / "other" / ("a.txt" if link.name == "link" else "."))
    else:
        in_place(file, "abc", "abd")()
    assert not reads.unchanged(found)


@pytest.mark.slow
def test_an_open_folder_is_listed_and_what_is_made_for_writing_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    with reads.recording() as recorder:
        fd = os.open(tmp_path / "many", os.O_RDONLY)
        os.listdir(fd)
        os.close(fd)
        for flags in (os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            os.close(os.open(tmp_path / "own", flags))
        found = recorder.reads(blind=False)
    assert str(tmp_path / "own") not in found
    (tmp_path / "many" / "b").touch()
    assert not reads.unchanged(found)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_a_file_in_shared_memory_is_a_file() -> None:
    with (
        tempfile.NamedTemporaryFile("w", dir="/dev/shm", prefix="unbroken-test-") as f,
        reads.recording() as r,
    ):
        Path(f.name).read_text()
        assert f.name in r.reads(blind=False)


@pytest.mark.slow
def test_what_a_shared_module_read_at_its_import_counts_for_every_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "names.json").write_text("[]")
    (tmp_path / "shared_names_of_tasks.py").write_text(
        "import json, os\nX = json.load(open(os.path.dirname(__file__) + '/na' + 'mes.json'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in ("first", "second"):
        with reads.recording() as recorder:
            importlib.import_module("shared_names_of_tasks")
            assert str(tmp_path / "names.json") in recorder.reads(blind=False)
    del sys.modules["shared_names_of_tasks"]


@pytest.mark.slow
def test_what_scoring_reads_is_noticed_too(tmp_path: Path, suite: Suite) -> None:
    gold = tmp_path / "elsewhere" / "gold.json"
    gold.write_text('"no such words"')
    (tmp_path / "suite/idle/score.py").write_text(
        f"import json\n\ndef score(row, output):\n    return json.load(open({str(gold.parent)!r} + '/go' + 'ld.json')) in output\n"
    )
    suite = replace(suite, tasks=suite.tasks[1:])
    assert run(tmp_path, suite).scores[0].metrics[0].value == 0.0
    in_place(gold, "no such words", "             ")()
    gold.write_text('""')
    found, report = fresh(tmp_path, suite)
    assert found == {} and report.scores[0].metrics[0].value == 1.0
    score = next((tmp_path / "suite/out/scores").rglob("idle.json"))
    before = score.stat().st_mtime_ns
    fresh(tmp_path, suite)
    assert score.stat().st_mtime_ns == before, "scored once for the change"


def test_stamps(tmp_path: Path) -> None:
    file, absent = tmp_path / "f", tmp_path / "later"
    file.write_text("abc")
    with reads.recording() as recorder:
        file.read_text()
        with pytest.raises(FileNotFoundError):
            absent.read_text()
        (tmp_path / "own").write_text("mine")
        (tmp_path / "own").read_text()
        found = recorder.reads(blind=False)
    assert str(tmp_path / "own") not in found and reads.unchanged(found)
    absent.write_text("now it is there")
    assert not reads.unchanged(found)
    absent.unlink()
    assert reads.unchanged(found)
    in_place(file, "abc", "abd")()
    assert not reads.unchanged(found)


@pytest.mark.slow
def test_tables_of_datasets_are_files_that_were_read(tmp_path: Path) -> None:
    """Arrow maps them without Python, and the table is gone when the task is prepared."""
    datasets = pytest.importorskip(
        "datasets", reason="datasets is not installed (pip install 'unbroken[eval]')"
    )
    datasets.Dataset.from_dict({"q": [1]}).save_to_disk(str(tmp_path / "d"))
    table = next((tmp_path / "d").glob("*.arrow"))
    with reads.recording() as recorder:
        (tmp_path / "any").touch()
        assert datasets.Dataset.from_file(str(table))[0] == {"q": 1}
        assert str(table) in recorder.reads(blind=False)


@pytest.mark.slow
def test_data_files_that_a_cache_holds_are_known(tmp_path: Path) -> None:
    """The second process finds them in the cache of `datasets`, and opens none of them."""
    pytest.importorskip("datasets", reason="datasets is not installed (pip install 'unbroken[eval]')")
    (tmp_path / "d.jsonl").write_text('{"q": 1}\n')
    code = (
        "import json, sys\nfrom unbroken.evaluate.preparation import reads\n"
        "with reads.recording() as r:\n"
        "    import datasets\n"
        f"    datasets.load_dataset('json', data_files={{'test': {str(tmp_path / 'd.jsonl')!r}}}, cache_dir={str(tmp_path / 'cache')!r})\n"
        "    print(json.dumps(sorted(r.reads())))\n"
    )
    for _ in range(2):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert str(tmp_path / "d.jsonl") in json.loads(said.splitlines()[-1])


def test_weights_and_tokenizers_that_are_overwritten_in_place(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("weights")
    before = FolderSource(model).files()
    in_place(model / "model.safetensors", "weights", "wreaths")()
    assert FolderSource(model).files() != before
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("abc")
    spec = ModelSpec(
        str(model), tokenizer=str(tmp_path / "tok"), options={"model_args": {"peft": str(model)}}
    )
    key = spec.key("c", beside(spec))
    in_place(tmp_path / "tok" / "tokenizer.json", "abc", "abd")()
    assert spec.key("c", beside(spec)) != key
    key = spec.key("c", beside(spec))
    in_place(model / "model.safetensors", "wreaths", "weights")()
    assert spec.key("c", beside(spec)) != key
    plain = ModelSpec(str(model))
    assert plain.key("c", beside(plain)) == plain.key("c")


@pytest.mark.slow
def test_a_data_file_with_its_old_size_and_time_is_another_one_to_datasets_too(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (pip install 'unbroken[eval]')")
    data = tmp_path / "d.jsonl"
    data.write_text('{"q": 1}\n')
    code = (
        "from unbroken.evaluate.harness.lm_eval.task_index import quiet_lm_eval\nquiet_lm_eval()\nimport datasets\n"
        f"print(datasets.load_dataset('json', data_files={{'test': {str(data)!r}}}, cache_dir={str(tmp_path / 'cache')!r})['test'][0]['q'])\n"
    )
    seen = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seen.append(done.stdout.split()[-1])
        in_place(data, "1", "2")()
    assert seen == ["1", "2"]
