"""Where a run stands, and the record of a run: `unbroken status` and `unbroken report`.

gather, RunReport         everything that a report shows, as data
write_report              writes report.html
read_status, RunStatus    one screen about a run, also one that is being written
"""

from .data import RunReport
from .gather import gather
from .run_status import RunStatus, read_status
from .write import report_json, write_report, write_report_safely

__all__ = [
    "RunReport",
    "RunStatus",
    "gather",
    "read_status",
    "report_json",
    "write_report",
    "write_report_safely",
]
