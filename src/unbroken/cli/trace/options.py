"""What the commands of `unbroken trace` are asked alike, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import UsageError, unreadable
from ...units import Duration

if TYPE_CHECKING:
    from ...trace.readers import ReadOptions
    from ...trace.settings import ReportSettings

Files = Annotated[
    list[Path], typer.Argument(help="Trace files or folders: CSV, JSON, sacct -P, Parquet; .gz and .zst too.")
]
Types = Annotated[Path | None, typer.Option("--types", help="TOML with your own rules for workload types.")]
Top = Annotated[int, typer.Option("--top", min=1, help="Users and teams listed by name.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@dataclass(frozen=True)
class ReadingOptions:
    """What every command that reads a trace is asked: how its files are read, and with how much of the machine."""

    fmt: str | None = typer.Option(
        None, "--format", help="Format instead of detection (see `unbroken trace formats`)."
    )
    maps: list[str] | None = typer.Option(
        None,
        "--map",
        help="Columns of any table: submit=timestamp,gpus=num_gpus (may repeat), or a TOML file.",
    )
    fields: str | None = typer.Option(
        None, "--fields", help="Column names of a file without a header, separated by commas."
    )
    timezone: str = typer.Option(
        "UTC", "--timezone", help="Zone of times that carry none, e.g. Europe/Berlin."
    )
    cluster: str | None = typer.Option(None, "--cluster", help="Name of the cluster.")
    memory: str | None = typer.Option(
        None, "--memory", help="Memory to use, e.g. 4GiB (default: half of the machine's)."
    )
    threads: int | None = typer.Option(None, "--threads", min=1, help="Threads to use (default: all).")
    scratch: Path | None = typer.Option(
        None, "--scratch", help="Folder for temporary files (default: the system's)."
    )

    def options(self) -> ReadOptions:
        """What a reader needs of it. Raises UsageError."""
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

        from ...trace.readers import ReadOptions

        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError) as e:
            raise UsageError(
                f"there is no time zone '{self.timezone}'",
                hint="Give an IANA name such as Asia/Shanghai or UTC",
            ) from e
        names = tuple(f.strip() for f in self.fields.split(",")) if self.fields else ()
        return ReadOptions(self.fmt, self.timezone, self.cluster, mapping_of(self.maps or []), names)


def mapping_of(maps: list[str]) -> dict[str, str]:
    """key -> column from `a=b,c=d` texts and TOML files; raises UsageError."""
    import tomllib

    out: dict[str, str] = {}
    for text in maps:
        if text.endswith(".toml"):
            try:
                data = tomllib.loads(Path(text).read_text("utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
                raise UsageError(
                    f"the mapping file cannot be read: {unreadable(e)}",
                    where=text,
                    hint='Write lines: submit = "column"',
                ) from e
            data = data.get("map", data)
            out |= {str(k): str(v) for k, v in data.items()}
            continue
        for pair in text.split(","):
            key, equals, column = pair.partition("=")
            if not equals or not key.strip() or not column.strip():
                raise UsageError(
                    f"--map '{pair}' is no pair", hint="Write --map submit=timestamp,gpus=num_gpus"
                )
            out[key.strip()] = column.strip()
    return out


def settings_of(
    pue: float, carbon: float, interval: str, restart: str, stall: str, top: int, retype: bool
) -> ReportSettings:
    """The declared numbers."""
    from ...trace.settings import ReportSettings

    return ReportSettings(
        pue=pue,
        carbon_kg_per_kwh=carbon,
        checkpoint_interval_s=float(Duration(interval)),
        restart_s=float(Duration(restart)),
        stall_s=float(Duration(stall)),
        top_users=top,
        retype=retype,
    )
