"""The folder of a plain task: its two files, its rows, and what is asked about each."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import DatasetMissing, InputError, UnknownKey, UnknownTask
from ...contracts import Json, ModelSpec, Request, Sample, Suite, Task, digest, prompt_hash
from ..chat import chat_of

_OPTIONS = frozenset({"data", "higher_is_better", "max_tokens", "samples", "temperature"})


@dataclass(frozen=True)
class Folder:
    """A task's folder, with its two files there."""

    path: Path

    @classmethod
    def find(cls, task: Task, suite: Suite, known: Sequence[str]) -> Folder:
        """The folder that the task names, relative to the suite. Raises UnknownTask, UnknownKey."""
        for key in task.options:
            if key not in _OPTIONS:
                raise UnknownKey(key, _OPTIONS, where=f"task '{task.name}'")
        path = (Path(suite.folder or ".") / task.harness_name).resolve()
        if not (path / "infer.py").is_file() or not (path / "score.py").is_file():
            raise UnknownTask(
                task.harness_name, known, where=f"plain: a folder with infer.py and score.py, {path}"
            )
        return cls(path)

    @property
    def code(self) -> str:
        """Hash of the folder's Python files: the task's version."""
        return digest([[p.name, p.read_text()] for p in sorted(self.path.glob("*.py"))])

    def load(self, name: str) -> Any:
        """One of its files as a module; files beside it can be imported. Raises InputError with the line."""
        file = self.path / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"unbroken_plain_{digest(str(file))[:12]}_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        _forget_others(self.path)
        sys.path.insert(0, str(self.path))
        try:
            spec.loader.exec_module(module)
        except Exception as e:
            raise InputError(
                f"{file.name} cannot be imported: {type(e).__name__}: {e}", where=str(file)
            ) from e
        finally:
            sys.path.remove(str(self.path))
        return module


_folders: set[Path] = set()
"""From which something was loaded in this process."""


def _forget_others(folder: Path) -> None:
    """Drops modules that lie beside another task's files: two tasks may each have a `helpers.py` of their own."""
    _folders.add(folder)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and Path(file).parent != folder and Path(file).parent in _folders:
            del sys.modules[name]


def rows_of(task: Task, suite: Suite, source: Folder, infer: Any) -> Iterator[Json]:
    if "data" not in task.options and hasattr(infer, "rows"):
        yield from infer.rows()
        return
    data = task.options.get("data")
    path = Path(suite.folder or ".") / str(data) if data else source.path / "data.jsonl"
    if not path.is_file():
        raise DatasetMissing(
            f"the data of task '{task.name}' are not on this machine",
            where=str(path.resolve()),
            hint="Put one JSON row a line there, or name the file with data = ... in the task's options",
        )
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as e:
                raise InputError(f"a row is no JSON: {e}", where=f"{path}:{number}") from e


def samples_of(
    rows: Sequence[Json], infer: Any, source: Folder, task: Task, spec: ModelSpec, model_files: Path | None
) -> Iterator[Sample]:
    ask: Callable[[Json], Any] | None = getattr(infer, "prompt", None)
    if ask is None:
        if not hasattr(infer, "infer"):
            raise InputError(
                "infer.py defines neither prompt(row) nor infer(model, rows)", where=str(source.path)
            )
        for i, row in enumerate(rows):
            whole = (Request("plain", (row,)),)
            yield Sample(i, whole, prompt_hash(whole))
        return
    chat = chat_of(spec, model_files) if spec.chat_template else None
    for i, row in enumerate(rows):
        try:
            asked = ask(row)
            parts = asked if isinstance(asked, list) and not _is_chat(asked) else [asked]
            requests = tuple(r for part in parts for r in _requests(part, chat, task))
        except Exception as e:
            raise InputError(
                f"prompt(row) raised {type(e).__name__}: {e}", where=f"{source.path / 'infer.py'}, row {i}"
            ) from e
        yield Sample(i, requests, prompt_hash(requests), row)


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)
    )


def _requests(part: Any, chat: Any, task: Task) -> Iterator[Request]:
    if isinstance(part, Mapping) and "choices" in part:
        yield from (Request("loglikelihood", (part["context"], str(c))) for c in part["choices"])
        return
    given = dict(part) if isinstance(part, Mapping) else {"prompt": part}
    prompt = given.pop("prompt")
    if chat is not None:
        prompt = chat(prompt if _is_chat(prompt) else [{"role": "user", "content": prompt}], True)
    for name, usual in (("max_tokens", 256), ("temperature", 0.0)):
        given.setdefault(name, task.options.get(name, usual))
    yield Request("generate_until", (prompt, settings_of(given)))


def settings_of(given: Mapping[str, Any]) -> dict[str, Json]:
    """Generation settings under the names that every backend reads."""
    rest = dict(given)
    temperature = float(rest.pop("temperature", 0.0))
    out: dict[str, Json] = {
        "until": list(rest.pop("stop", [])),
        "max_gen_toks": int(rest.pop("max_tokens", 256)),
        "do_sample": temperature > 0,
    }
    if temperature > 0:
        out["temperature"] = temperature
    return {**out, **rest}


def check_score(source: Folder) -> None:
    if not hasattr(source.load("score"), "score"):
        raise InputError("score.py defines no score(row, output)", where=str(source.path))
