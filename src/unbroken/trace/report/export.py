"""Figures as files: SVG always; PNG with rsvg-convert, resvg or a headless browser, whichever is there."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from ... import atomic
from ...errors import TraceError
from ...page.charts.drawing import as_file
from ...page.charts.svg import render
from .build import TraceReport

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
CONVERTERS = ("rsvg-convert", "resvg")
SCALE = 2


def converter() -> str | None:
    """The program that makes PNG of SVG on this machine, a browser only where there is no lighter one."""
    for name in (*CONVERTERS, *BROWSERS):
        if found := shutil.which(name):
            return found
    return None


def write_images(report: TraceReport, folder: Path, *, png: bool) -> list[Path]:
    """Writes each panel as SVG, and as PNG if asked; returns the files. Raises TraceError if PNG cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    program = converter() if png else None
    if png and program is None:
        raise TraceError(
            "PNG needs a program that can draw SVG, and none is here",
            hint="Install librsvg (rsvg-convert), resvg or Chromium, or use --svg",
        )
    out: list[Path] = []
    for figure in report.figures:
        for i, panel in enumerate(figure.panels):
            stem = f"{figure.key}-{i + 1}" if len(figure.panels) > 1 else figure.key
            svg = strip_hover(render(panel, 760 if len(figure.panels) == 1 else 520, 310))
            path = folder / f"{stem}.svg"
            atomic.write_text(path, svg, durable=False)
            out.append(path)
            if program:
                to_png(program, path, folder / f"{stem}.png")
                out.append(folder / f"{stem}.png")
    return out


def strip_hover(svg: str) -> str:
    """The drawing as a file, without the data that only the page needs."""
    import re

    return as_file(re.sub(r' data-(chart|series)="[^"]*"', "", svg))


def to_png(program: str, svg: Path, png: Path) -> None:
    """One PNG at twice the drawing's size."""
    name = Path(program).name
    with tempfile.TemporaryDirectory(prefix="unbroken-png-") as scratch:
        if name == "rsvg-convert":
            command = [program, "-z", str(SCALE), "-o", str(png), str(svg)]
        elif name == "resvg":
            command = [program, "-z", str(SCALE), str(svg), str(png)]
        else:
            width, height = size_of(svg)
            command = [
                program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                f"--user-data-dir={scratch}", f"--force-device-scale-factor={SCALE}", f"--window-size={width},{height}",
                f"--screenshot={png.resolve()}", svg.resolve().as_uri(),
            ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or not png.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise TraceError(
            f"{name} did not draw {svg.name}: {last}", where=str(svg), hint="Use --svg, or another program"
        )


def size_of(svg: Path) -> tuple[int, int]:
    """Width and height that the drawing declares."""
    import re

    m = re.search(r'width="(\d+)" height="(\d+)"', svg.read_text("utf-8"))
    return (int(m[1]), int(m[2])) if m else (760, 310)
