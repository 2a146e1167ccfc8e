"""What the supervisor knows of an attempt's end, and where its logs lie: what a diagnosis is given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....cluster.clocks import ClockOffset
from ....detect.stacks import name_place
from ....diagnose import Facts, HangFact, RankPlace
from ....progress import RunDir
from ....progress.rundir import WAITING
from ..attempt.attempt import Attempt
from ..attempt.hang import explain, write_picture
from ..attempt.outcome import AttemptOutcome, NodeEnd


def logs_of(run_dir: RunDir, attempt: Attempt) -> list[Path]:
    """The rank logs of an attempt that exist."""
    paths = [run_dir.rank_log(attempt.number, s.node, r) for r, s in sorted(attempt.ranks.items())]
    return [p for p in paths if p.exists()]


def describe_hang(
    attempt: Attempt, outcome: AttemptOutcome, evidence: Path, dumps: Sequence[Path] = ()
) -> HangFact | None:
    """The hang that ended an attempt, if it was one; `evidence` is where its stacks lie, if any were collected; `dumps` are
    those of NCCL's flight recorders."""
    if outcome.hang is None:
        return None
    picture = explain(attempt, outcome.processes, dumps)
    if outcome.processes:
        write_picture(picture, evidence / WAITING)
    return HangFact(
        step=attempt.step, phase=outcome.hang.phase.name.lower(), idle_s=round(outcome.hang.idle_s, 2),
        late=tuple(c.rank for c in picture.culprits) or outcome.hang.behind, stacks=str(evidence) if evidence.is_dir() else None,
        where=name_place(outcome.processes), named=picture.culprits, why=picture.why,
    )  # fmt: skip


def collect_facts(
    attempt: Attempt,
    outcome: AttemptOutcome,
    silent: Mapping[str, str],
    hang: HangFact | None,
    *,
    run_step: int,
    noticed: float,
    wall_clocks: Mapping[str, ClockOffset],
) -> Facts:
    """All that is known of an attempt's end, once its processes are gone. `run_step` is the highest step before it, -1 for
    none; `noticed` is in seconds since the epoch; `wall_clocks` are the nodes' clocks as far as they are known."""
    kind = outcome.kind
    ranks = sorted(attempt.ranks.items())
    agents = [n for n, end in outcome.nodes.items() if end is NodeEnd.AGENT_LOST]
    return Facts(
        exits=attempt.exits(),
        lost_nodes=tuple(outcome.lost_nodes),
        hang=hang,
        loss=outcome.loss,
        corruption=outcome.corruption,
        nodes=tuple((r, s.node) for r, s in ranks),
        oom_kills=tuple(r for r, s in ranks if s.exit is not None and s.exit.oom),
        completed=attempt.all_finished,
        step=attempt.step if attempt.step >= 0 else None,
        run_step=run_step,
        total=attempt.total,
        silent=silent,
        agents_lost=tuple(agents) if kind == "agent_lost" else (),
        lease_expired=attempt.stopped_by_us() if kind in ("lease", "supervisor_lost") else None,
        launch_error=outcome.error if kind == "start_failed" else "",
        preempted=outcome.error if kind in ("preempted", "slow") else "",
        supervisor_lost=kind == "supervisor_lost",
        places={
            r: RankPlace(
                s.step,
                look.frames if (look := outcome.processes.get(r)) is not None else (),
                next(iter(look.text.splitlines()), "") if look is not None else "",
            )
            for r, s in ranks
        },
        noticed=noticed,
        wall_clocks={n: c for n, c in wall_clocks.items() if not math.isinf(c.uncertainty_s)},
    )
