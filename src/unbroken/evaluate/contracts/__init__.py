"""What travels through an evaluation, and the protocols of the parts that meet in it.

    suite/        Suite, Task            read from TOML
    Harness       expand, prepare        coordinator's machine, CPU, before a GPU is taken: stages data, writes Samples
    plan/         Shard                  runs of whole blocks of one task, longest first
    engines/      Harness.run            GPU side: Backend.load once, then Samples of one block -> Answers, block by block
    run/          journal, answers       the only writer of files; calls ScoringPool.submit when a task's last block landed
    scoring/      Harness.score          CPU workers: Answers -> Score
    result/page   Report                 what people look at

All that the parts agree on stands here: json_values.py, asked.py, samples.py, assigned.py, scored.py, protocols.py.

Who calls what:

* The coordinator calls `Harness.list_tasks` (to name the nearest one), `Harness.expand` (a group becomes its leaf
  tasks), `Harness.prepare` (once per task; in a CPU process; everything that costs CPU and is not scoring belongs
  here: data sets, few-shot prompts, chat templates), and at the end `Harness.combine` for groups.
* A worker (its own process, one per GPU or per group of `ModelSpec.gpus`) calls `Backend.load` once and then
  `Harness.run(model, samples)` with *the samples of exactly one block* at a time. A block is never cut and never
  joined with another one, whatever the number of workers: that, and nothing else, makes answers independent of the
  number of workers. On `OutOfMemory` it calls `Model.halve` and runs the same block again.
* Between blocks the worker receives what the coordinator sends: the tail of its shard may be given to an idle worker.
* A scoring worker calls `Harness.score` with the exact set of answers: every sample id of the task once, in order.

Sample ids are positions 0 .. n-1 in the task's documents, in the order in which `prepare` wrote them. Times are Unix
seconds, durations seconds, sizes bytes. Nothing here imports torch or a harness.
"""

from __future__ import annotations

from .asked import ModelSpec, Suite, Task, TaskPrior
from .assigned import Assignment, Conditions, Shard, WorkerSeen
from .json_values import Json, digest
from .protocols import Backend, FedModel, Harness, Model, ScoresInParts, ScoringPool
from .samples import Answer, PreparedTask, Request, Sample, prompt_hash
from .scored import Check, Metric, Report, SampleNote, Score, ScoreDone, ScoreJob

__all__ = [
    "Answer",
    "Assignment",
    "Backend",
    "Check",
    "Conditions",
    "FedModel",
    "Harness",
    "Json",
    "Metric",
    "Model",
    "ModelSpec",
    "PreparedTask",
    "Report",
    "Request",
    "Sample",
    "SampleNote",
    "Score",
    "ScoreDone",
    "ScoreJob",
    "ScoresInParts",
    "ScoringPool",
    "Shard",
    "Suite",
    "Task",
    "TaskPrior",
    "WorkerSeen",
    "digest",
    "prompt_hash",
]
