"""The names that lm-evaluation-harness knows, where their YAML files lie, and the leaves of its groups.

Reading its 14,000 YAML files costs seven seconds in every process, so what is needed of them is kept in the user's
cache folder, by version. Local folders are small and are read each time.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .... import atomic
from ....errors import EvaluationError, MissingExtra, UnknownTask

Json = Any


@dataclass(frozen=True)
class TaskEntry:
    """One name: a task, a group of tasks, or a tag (a set of tasks without a score of its own)."""

    name: str
    kind: str
    """'task', 'group' or 'tag'."""
    path: str = ""
    """Its YAML file; empty for tags."""
    config: Mapping[str, Json] = field(default_factory=dict)
    """A group's whole YAML, functions as strings; empty for tasks."""
    members: tuple[str, ...] = ()
    """A tag's tasks."""
    functions: bool = False
    """A group whose YAML names Python functions: its leaves are loaded with it, not apart from it."""


@dataclass(frozen=True)
class Leaf:
    """One task of a group, and what to ask the harness for so that it comes with the group's overrides."""

    name: str
    spec: Json
    """A name, or a group written inline that holds this leaf alone."""
    folders: tuple[str, ...]
    """Where the YAML files lie that the loading needs."""


class TaskIndex:
    """Looks names up in local folders first, then among the tasks that come with the harness."""

    def __init__(self, include: Sequence[Path] = ()) -> None:
        self.include = tuple(include)
        for folder in self.include:
            if not folder.is_dir():
                raise EvaluationError(
                    "the folder with the local tasks is not there",
                    where=str(folder),
                    hint="Fix `include` in the task's options; relative paths start at the suite's folder",
                )
        self._local = _scan(self.include, defaults=False) if self.include else {}
        self._builtin: dict[str, TaskEntry] | None = None

    def names(self) -> list[str]:
        """Every name that may be asked for."""
        return sorted({**self._all_builtin(), **self._local})

    def find(self, name: str) -> TaskEntry:
        """The entry of a name. Raises UnknownTask with the nearest names."""
        entry = self._local.get(name) or self._all_builtin().get(name)
        if entry is None:
            raise UnknownTask(name, self.names(), where="lm_eval")
        return entry

    def leaves(self, name: str) -> list[Leaf]:
        """The tasks behind a name, each loadable alone, in the harness's order. Raises UnknownTask."""
        entry = self.find(name)
        if entry.kind == "task":
            return [Leaf(name, name, self._folders([entry]))]
        if entry.kind == "tag":
            return [leaf for member in sorted(entry.members) for leaf in self.leaves(member)]
        found = list(self._walk(entry, {}))
        if any(whole for _, _, whole in found):
            folders = self._folders(self._entries(entry))
            return [Leaf(leaf, name, folders) for leaf, _, _ in found]
        return [
            Leaf(leaf, _alone(leaf, overrides), self._folders([self.find(leaf)]))
            for leaf, overrides, _ in found
        ]

    def groups(self, name: str) -> list[TaskEntry]:
        """The group itself and every named group inside it, children first; empty for tasks and tags."""
        entry = self.find(name)
        if entry.kind != "group":
            return []
        inner = [g for child in _children(entry) if (g := self._get(child)) and g.kind == "group"]
        return [x for g in inner for x in self.groups(g.name)] + [entry]

    def children(self, group: TaskEntry) -> list[str]:
        """The leaf tasks below a group, in order."""
        return [leaf for leaf, _, _ in self._walk(group, {})]

    def _get(self, name: str) -> TaskEntry | None:
        return self._local.get(name) or self._all_builtin().get(name)

    def _walk(
        self, group: TaskEntry, overrides: dict[str, Json]
    ) -> Iterator[tuple[str, dict[str, Json], bool]]:
        """(leaf, overrides, must be loaded with its group), as the harness's own factory passes them down."""
        own = {k: v for k, v in group.config.items() if k not in _GROUP_FIELDS}
        merged = {**own, **overrides}
        members = group.config.get("task") or []
        for item in [members] if isinstance(members, str) else members:
            if isinstance(item, str):
                name, given, inline = item, merged, False
            elif "group" in item:
                name = item["group"]
                inline = self._get(name) is None
                given = {**merged, **{k: v for k, v in item.items() if k != "group"}}
            else:
                name, given, inline = item["task"], {**merged, **item}, self._get(item["task"]) is None
            entry = self._get(name)
            if inline or entry is None:
                # Written out inside the group: it exists nowhere else, so it is loaded with the group.
                if isinstance(item, Mapping) and "group" in item:
                    nested = TaskEntry(f"{group.name}::{name}", "group", group.path, item, functions=True)
                    yield from self._walk(nested, merged)
                else:
                    yield f"{group.name}::{name}", given, True
            elif entry.kind == "group":
                for leaf, more, whole in self._walk(entry, {k: v for k, v in given.items() if k != "task"}):
                    yield leaf, more, whole or group.functions
            elif entry.kind == "tag":
                for member in sorted(entry.members):
                    yield member, given, group.functions
            else:
                yield str(given.get("task", name)) if name != item else name, given, group.functions

    def _entries(self, entry: TaskEntry) -> list[TaskEntry]:
        out = [entry]
        for child in _children(entry):
            found = self._get(child)
            if found is None:
                continue
            if found.kind == "tag":
                out += [e for m in found.members if (e := self._get(m))]
            else:
                out += self._entries(found) if found.kind == "group" else [found]
        return out

    def _folders(self, entries: Iterable[TaskEntry]) -> tuple[str, ...]:
        local = {str(p) for p in self.include}
        return tuple(sorted(local | {str(Path(e.path).parent) for e in entries if e.path}))

    def _all_builtin(self) -> dict[str, TaskEntry]:
        if self._builtin is None:
            self._builtin = _builtin()
        return self._builtin


_GROUP_FIELDS = frozenset({"group", "group_alias", "task", "aggregate_metric_list", "metadata"})
"""What belongs to a group; everything else in its YAML is handed down to its tasks."""


def _alone(leaf: str, overrides: Mapping[str, Json]) -> Json:
    """What to ask for so that one leaf comes with its group's overrides: its name, or a group of one."""
    given = {k: v for k, v in overrides.items() if k not in ("task", "group")}
    return {"group": "unbroken_one", "task": [{"task": leaf, **given}]} if given else leaf


def _children(entry: TaskEntry) -> list[str]:
    members = entry.config.get("task") or []
    return [
        m if isinstance(m, str) else str(m.get("group") or m.get("task"))
        for m in ([members] if isinstance(members, str) else members)
    ]


def _scan(folders: Sequence[Path], *, defaults: bool) -> dict[str, TaskEntry]:
    """Reads YAML files through the harness's own index."""
    manager = quiet_lm_eval().tasks.TaskManager(
        include_path=[str(f) for f in folders] or None, include_defaults=defaults
    )
    out = {}
    for name, e in manager.task_index.items():
        kind = {"GROUP": "group", "TAG": "tag"}.get(e.kind.name, "task")
        path = str(e.yaml_path) if e.yaml_path else ""
        config = _plain(e.cfg) if kind == "group" and e.cfg else {}
        functions = kind == "group" and bool(path) and "!function" in Path(path).read_text(errors="replace")
        members = tuple(sorted(e.tags)) if kind == "tag" else ()
        out[name] = TaskEntry(name, kind, path, config, members, functions)
    return out


def _plain(value: Any) -> Json:
    return json.loads(json.dumps(value, default=str))


def _builtin() -> dict[str, TaskEntry]:
    """The harness's own tasks, from the cache where it is of this version and place."""
    lm_eval = quiet_lm_eval()
    home = str(Path(lm_eval.__file__).parent)
    stamp = {"version": _version(), "home": home, "schema": 1}
    cache = cache_folder() / f"lm_eval-{_version()}-tasks.json"
    try:
        kept = json.loads(cache.read_text())
        if kept.get("stamp") == stamp:
            return {n: TaskEntry(n, k, p, c, tuple(m), f) for n, (k, p, c, m, f) in kept["entries"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent, torn or of another version: made again below
    entries = _scan((), defaults=True)
    rows = {n: [*list(asdict(e).values())[1:]] for n, e in entries.items()}
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(cache, json.dumps({"stamp": stamp, "entries": rows}).encode(), durable=False)
    except OSError:
        pass  # a read-only home: slower, not wrong
    return entries


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/unbroken`, or ~/.cache/unbroken."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unbroken"


def quiet_lm_eval() -> Any:
    """The lm_eval package, without its progress bars and chatter. Raises MissingExtra."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import datasets
        import lm_eval
        import lm_eval.tasks
    except ModuleNotFoundError as e:
        raise MissingExtra(e.name or "lm-eval", "eval", what="the lm_eval harness") from e
    datasets.disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    _compile_templates_once()
    _tell_files_apart()
    return lm_eval


def _compile_templates_once() -> None:
    """Keeps what a template is compiled to: lm_eval compiles the same few for every document, most of what preparing and
    scoring take."""
    from lm_eval.utils import env

    if not hasattr(env.from_string, "cache_info"):
        env.from_string = functools.lru_cache(maxsize=1024)(env.from_string)


def _tell_files_apart() -> None:
    """Has `datasets` name its caches after more than a local file's time of change: two files may share that, and the
    second one would be answered for with the rows of the first."""
    import datasets.data_files as theirs

    before = theirs._get_single_origin_metadata
    if hasattr(before, "_unbroken"):
        return

    def metadata(data_file: str, *args: Any, **more: Any) -> Any:
        found = before(data_file, *args, **more)
        try:
            st = os.stat(data_file)
        except (OSError, ValueError):
            return found  # of a repository
        return (*found, f"{st.st_size}-{st.st_ctime_ns}-{st.st_ino}")

    metadata._unbroken = True  # type: ignore[attr-defined]
    theirs._get_single_origin_metadata = metadata


def _version() -> str:
    from importlib.metadata import version

    return version("lm_eval")
