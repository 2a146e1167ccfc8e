"""The report: one HTML file, the figures as SVG and PNG, everything as one JSON."""

from __future__ import annotations

from .build import TraceReport, build_report
from .export import write_images
from .html import page

__all__ = ["TraceReport", "build_report", "page", "write_images"]
