"""What killed this job? Diagnoses a folder of logs, or a few lines of one, and acts on the verdict.

python examples/diagnose_a_job.py [LOGS]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from unbroken.diagnose import Action, diagnose

AN_ECC_ERROR = """\
[2026-02-27 08:03:00] submitting job 4711 partition=llm nodes=2 nodelist=node-078,node-203 gpus_per_node=1
node-078:2002:2302 [0] NCCL INFO comm 0x1336f675cc rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 3a000 commId 0xbc07 - Init COMPLETE
node-203:2004:2304 [0] NCCL INFO comm 0x236b0d549b rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 18000 commId 0xbc07 - Init COMPLETE
 [2026-02-27 08:14:50] iteration      120/  500000 | elapsed time per iteration (ms): 4410.2 | lm loss: 2.713E+00 |
Feb 27 08:14:55 node-078 kernel: NVRM: Xid (PCI:0000:3a:00): 95, pid=2002, name=python3, Uncontained: SM (0x1). RST: Yes, D-RST: No
[rank0]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.
srun: error: node-078: task 0: Exited with exit code 1
"""


def main() -> None:
    if len(sys.argv) > 1:
        logs = Path(sys.argv[1])
    else:
        logs = Path(tempfile.mkdtemp())
        (logs / "job.log").write_text(AN_ECC_ERROR)

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
