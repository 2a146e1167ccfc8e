"""What killed this job? Diagnoses a folder of logs, or one that it makes up, and acts on the verdict.

python examples/diagnose_a_job.py [LOGS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from unbroken.diagnose import Action, diagnose
from unbroken.testing.failure_logs import KINDS, make, write


def main() -> None:
    if len(sys.argv) > 1:
        logs = Path(sys.argv[1])
    else:
        logs = Path(tempfile.mkdtemp())
        lines, label = make(KINDS[1], "megatron", seed=7)  # an uncorrectable ECC error under a Megatron job
        write(logs, "job", lines, label)

    verdict = diagnose([logs])

    print(
        f"{verdict.outcome}: {verdict.reason}, first seen at {verdict.root.file}:{verdict.root.line}"
        if verdict.root
        else verdict.outcome
    )
    if verdict.action is Action.RESTART_ELSEWHERE:
        print(f"restart without {', '.join(verdict.cordon)}")
    elif verdict.action is Action.STOP:
        print(f"do not restart: {verdict.mitigation}")


if __name__ == "__main__":
    main()
