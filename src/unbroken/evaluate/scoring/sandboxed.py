"""Scores a whole job inside the sandbox: for harnesses whose code metrics run programs in their own process.

The sandbox sees the prompts, the answers, the task's files and the libraries, all read-only; the score comes back
as the last line of its stdout. A hostile program can spoil the score of its own task, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from ...errors import UnbrokenError
from ...journal import codec
from ...link.bounds import Malformed, decode
from ..contracts import Json, Score, ScoreJob
from ..processes.bytecode import readable_bytecode
from ..suite.received import words
from . import watch, worker
from .paths import is_home, python_paths
from .sandbox import CommandEnd, SandboxLimits, SandboxUnavailable, run

_SCORE, _AT = "unbroken-score ", "unbroken-at "
_SAMPLE = re.compile(re.escape(_AT) + r"(-?[0-9]{1,12})")


def score_in_sandbox(
    job: ScoreJob, skip: Mapping[int, str], memory: int, sample_s: float, start_s: float
) -> tuple[Json, str, int | None]:
    """(answer, "", None), or (None, why it ended, the sample that it was at)."""
    order = {"job": codec.encode(job), "skip": {str(k): v for k, v in skip.items()}, "write": False}
    samples = max(1, job.prepared.samples)
    limits = SandboxLimits(
        cpu_s=sample_s * samples + start_s,
        wall_s=sample_s * samples + 2 * start_s,
        memory=memory,
        address_space=1 << 46,
        processes=256,
        scratch=256 << 20,
        files=1024,
    )

    def patience(said: bytes) -> float:
        """A sample's time while one is being scored; else the time to load, or to aggregate."""
        last = said.splitlines()[-1] if said else b""
        return sample_s if last.startswith(_AT.encode()) and not last.endswith(b"-1") else start_s

    modules = os.environ.get("HF_MODULES_CACHE") or str(
        Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "modules"
    )
    source = str(Path(__file__).resolve().parents[3])
    env = {
        "UNBROKEN_SANDBOX": "1", "PYTHONPATH": source, "HF_HUB_OFFLINE": "1", "HF_HOME": "/tmp/hf",
        "HF_ALLOW_CODE_EVAL": "1", "DISABLE_MULTIPROC": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false",
        "UNBROKEN_MODULES": modules, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    shown = source if not is_home(source) else str(Path(source) / "unbroken")
    tasks = _task_folders(job)
    compiled, bytecode = readable_bytecode([*python_paths(), shown, *tasks])
    readable = [shown, job.prepared.folder, job.answers, modules, *tasks, *bytecode]
    try:
        out = run(
            [sys.executable, "-m", "unbroken.evaluate.scoring.sandboxed"],
            limits,
            files={"order.json": json.dumps(order).encode()},
            readable=readable,
            env={**env, **compiled},
            patience=patience,
        )
    except SandboxUnavailable as e:
        return {"error": {}, "text": str(e)}, "", None
    return read_answer(job, out)


def read_answer(job: ScoreJob, out: CommandEnd) -> tuple[Json, str, int | None]:
    """What the sandbox's output comes to, as `score_in_sandbox` returns it.

    Generated code runs in the process that writes it: it may write lines of its own. Whatever they say is at most a
    wrong score of this task, or the word that its output is forged; nothing here raises.
    """
    lines = out.stdout.decode(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith(_SCORE):
            try:
                return _checked(job, decode(line.removeprefix(_SCORE).encode())), "", None
            except (Malformed, UnbrokenError) as e:
                text = (
                    f"the scorer's answer makes no sense, generated code may have written it: {words(str(e))}"
                )
                return {"error": {}, "text": text}, "", None
    at = [int(found[1]) for line in lines if (found := _SAMPLE.fullmatch(line))]
    why = {"timeout": "took too long", "memory": "took too much memory"}.get(
        out.status, f"ended with code {out.code}"
    )
    sys.stderr.write(out.stderr.decode(errors="replace")[-4000:])
    return None, why, at[-1] if at and 0 <= at[-1] < job.prepared.samples else None


def _checked(job: ScoreJob, answer: Json) -> Json:
    """The answer, if it is a score of this task or an error. Raises Malformed, UnbrokenError."""
    if "text" in answer:
        return {"error": {}, "text": words(answer["text"])}
    score, p = codec.decode(Score, answer.get("score"), where="score"), job.prepared
    if (score.task, score.version, score.prompt_hash, score.samples) != (
        p.task.name, p.version, p.prompt_hash, p.samples,
    ):  # fmt: skip
        raise Malformed("it is the score of something else")
    if (
        not 0 <= score.scored <= score.samples
        or len(score.metrics) > 1000
        or len(score.notes) > score.samples
    ):
        raise Malformed("its counts are impossible")
    return {"score": codec.encode(score)}


def _task_folders(job: ScoreJob) -> list[str]:
    try:
        recipe = json.loads((Path(job.prepared.folder) / "lm_eval.json").read_text())
    except FileNotFoundError:
        return []
    return [str(f) for f in recipe["folders"]]


def main() -> int:
    """Inside: reads the order, scores, and says so."""
    modules = Path(os.environ.get("UNBROKEN_MODULES", ""))
    if modules.is_dir():
        shutil.copytree(modules, "/tmp/hf/modules", dirs_exist_ok=True)  # libraries write locks beside them
    order = json.loads(Path("order.json").read_text())
    said = os.dup(1)
    os.set_inheritable(said, False)
    os.dup2(2, 1)
    watch.tell(lambda sample: os.write(said, f"{_AT}{sample}\n".encode()))
    os.write(said, (_SCORE + json.dumps(worker.serve(order, {})) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
