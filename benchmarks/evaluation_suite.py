"""Writes src/unbroken/evaluate/suites/core63.toml: 63 public datasets with what they cost, from the table below.

    python benchmarks/evaluation_suite.py            # rewrites the file; a test holds that it is what this writes

Where the numbers come from. Names are lm-evaluation-harness tasks; sizes are the published sizes of the test (or
validation) splits; characters, tokens and licences are typical ones, written down by hand. None of it is a
measurement of ours, and nothing is copied from anybody's timing table: seconds follow from the formula

    seconds = samples * (characters * PER_CHAR + tokens * PER_TOKEN + requests * PER_REQUEST)

for a 7B model in bf16 on one A100 with an unoptimised generate loop. The three rates are set so that HumanEval takes
the 114 s of inference that follow from what is published about it (42 s of metrics are 19.0 % of a trial, loading and
preprocessing 29.5 %), so that the mean dataset takes about two minutes, and so that reading and writing stand in the
ratio of a 7B model's prefill and batched decode. `unbroken eval` replaces all this by what it measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PER_CHAR = 1.0e-5
PER_TOKEN = 2.3e-3
PER_REQUEST = 2.5e-3
OUT = Path(__file__).resolve().parents[1] / "src" / "unbroken" / "evaluate" / "suites" / "core63.toml"


@dataclass(frozen=True)
class Row:
    """One dataset."""

    name: str
    samples: int
    requests: int
    """Per sample."""
    chars: int
    """Characters read per sample, a prefix that its requests share counted once."""
    tokens: int
    """Tokens generated per sample."""
    metric: str
    score_s: float
    """CPU seconds of the metric."""
    licence: str
    shots: int = 0

    @property
    def seconds(self) -> float:
        """Inference, 7B, one A100."""
        return self.samples * (self.chars * PER_CHAR + self.tokens * PER_TOKEN + self.requests * PER_REQUEST)


ROWS = [
    Row("arc_challenge", 1172, 4, 560, 0, "loglikelihood", 2, "CC-BY-SA-4.0"),
    Row("arc_easy", 2376, 4, 480, 0, "loglikelihood", 2, "CC-BY-SA-4.0"),
    Row("hellaswag", 10042, 4, 900, 0, "loglikelihood", 5, "MIT"),
    Row("winogrande", 1267, 2, 220, 0, "loglikelihood", 1, "CC-BY-4.0"),
    Row("piqa", 1838, 2, 420, 0, "loglikelihood", 1, "AFL-3.0"),
    Row("boolq", 3270, 2, 700, 0, "loglikelihood", 2, "CC-BY-SA-3.0"),
    Row("openbookqa", 500, 4, 300, 0, "loglikelihood", 1, "Apache-2.0"),
    Row("commonsense_qa", 1221, 5, 1800, 0, "loglikelihood", 1, "MIT", 7),
    Row("social_iqa", 1954, 3, 450, 0, "loglikelihood", 1, "CC-BY-4.0"),
    Row("sciq", 1000, 4, 900, 0, "loglikelihood", 1, "CC-BY-NC-3.0"),
    Row("truthfulqa_mc2", 817, 5, 4200, 0, "loglikelihood", 1, "Apache-2.0"),
    Row("truthfulqa_gen", 817, 1, 900, 50, "match", 75, "Apache-2.0"),
    Row("mmlu", 14042, 4, 2900, 0, "loglikelihood", 8, "MIT", 5),
    Row("mmlu_pro", 1203, 1, 4200, 110, "match", 4, "MIT", 5),
    Row("gsm8k", 1319, 1, 2800, 95, "match", 3, "MIT", 5),
    Row("minerva_math", 700, 1, 2400, 190, "match", 95, "MIT", 4),
    Row("mathqa", 2985, 5, 500, 0, "loglikelihood", 2, "Apache-2.0"),
    Row("asdiv", 2305, 1, 300, 0, "loglikelihood", 1, "CC-BY-NC-4.0"),
    Row("bbh_cot_fewshot", 1080, 1, 3600, 120, "match", 4, "MIT", 3),
    Row("drop", 1500, 1, 2900, 12, "match", 20, "CC-BY-SA-4.0", 3),
    Row("squadv2", 3000, 2, 900, 8, "match", 12, "CC-BY-SA-4.0"),
    Row("triviaqa", 3500, 1, 900, 10, "match", 5, "Apache-2.0", 5),
    Row("nq_open", 3610, 1, 600, 8, "match", 4, "CC-BY-SA-3.0", 5),
    Row("webqs", 2032, 2, 500, 0, "loglikelihood", 1, "CC-BY-4.0", 5),
    Row("lambada_openai", 5153, 1, 400, 0, "loglikelihood", 1, "MIT"),
    Row("wikitext", 62, 1, 20000, 0, "loglikelihood", 1, "CC-BY-SA-3.0"),
    Row("race", 1045, 4, 2600, 0, "loglikelihood", 1, "other"),
    Row("copa", 100, 2, 110, 0, "loglikelihood", 1, "BSD-2-Clause"),
    Row("cb", 56, 3, 500, 0, "loglikelihood", 1, "other"),
    Row("wic", 638, 2, 230, 0, "loglikelihood", 1, "CC-BY-NC-4.0"),
    Row("wsc", 104, 2, 250, 0, "loglikelihood", 1, "CC-BY-4.0"),
    Row("rte", 277, 2, 420, 0, "loglikelihood", 1, "other"),
    Row("multirc", 4848, 2, 1700, 0, "loglikelihood", 2, "other"),
    Row("record", 2500, 9, 1300, 0, "loglikelihood", 6, "other"),
    Row("cola", 1043, 2, 90, 0, "loglikelihood", 1, "other"),
    Row("mnli", 4000, 3, 300, 0, "loglikelihood", 2, "other"),
    Row("mrpc", 408, 2, 320, 0, "loglikelihood", 1, "other"),
    Row("qnli", 5463, 2, 300, 0, "loglikelihood", 2, "CC-BY-SA-4.0"),
    Row("qqp", 6000, 2, 200, 0, "loglikelihood", 2, "other"),
    Row("sst2", 872, 2, 150, 0, "loglikelihood", 1, "other"),
    Row("anli_r1", 1000, 3, 500, 0, "loglikelihood", 1, "CC-BY-NC-4.0"),
    Row("anli_r2", 1000, 3, 500, 0, "loglikelihood", 1, "CC-BY-NC-4.0"),
    Row("anli_r3", 1200, 3, 500, 0, "loglikelihood", 1, "CC-BY-NC-4.0"),
    Row("humaneval", 164, 1, 450, 299, "code", 42, "MIT"),
    Row("mbpp", 500, 1, 1400, 130, "code", 120, "CC-BY-4.0", 3),
    Row("ifeval", 541, 1, 300, 330, "match", 25, "Apache-2.0"),
    Row("agieval_en", 2546, 4, 1500, 0, "loglikelihood", 2, "MIT"),
    Row("ceval-valid", 1346, 4, 1400, 0, "loglikelihood", 2, "CC-BY-NC-SA-4.0", 5),
    Row("cmmlu", 11582, 4, 900, 0, "loglikelihood", 6, "CC-BY-NC-4.0", 5),
    Row("xnli", 9960, 3, 260, 0, "loglikelihood", 4, "CC-BY-NC-4.0"),
    Row("xcopa", 5500, 2, 130, 0, "loglikelihood", 2, "CC-BY-4.0"),
    Row("xstorycloze", 15110, 2, 300, 0, "loglikelihood", 4, "CC-BY-SA-4.0"),
    Row("mgsm_direct", 2750, 1, 900, 22, "match", 3, "CC-BY-SA-4.0"),
    Row("pubmedqa", 1000, 3, 1600, 0, "loglikelihood", 1, "MIT"),
    Row("medqa_4options", 1273, 4, 1000, 0, "loglikelihood", 1, "MIT"),
    Row("medmcqa", 4183, 4, 320, 0, "loglikelihood", 2, "Apache-2.0"),
    Row("headqa_en", 2742, 4, 350, 0, "loglikelihood", 2, "MIT"),
    Row("logiqa", 651, 4, 900, 0, "loglikelihood", 1, "other"),
    Row("toxigen", 940, 2, 180, 0, "loglikelihood", 1, "other"),
    Row("coqa", 500, 1, 2600, 30, "match", 15, "other"),
    Row("gpqa_main_zeroshot", 448, 4, 800, 0, "loglikelihood", 1, "CC-BY-4.0"),
    Row("belebele", 5000, 4, 1100, 0, "loglikelihood", 3, "CC-BY-SA-4.0"),
    Row("blimp", 8000, 2, 80, 0, "loglikelihood", 3, "CC-BY-4.0"),
]


def text() -> str:
    """The suite as TOML."""
    lines = [
        "# Written by benchmarks/evaluation_suite.py, which says where the numbers come from.",
        "[suite]",
        'name = "core63"',
        'description = "63 public datasets: knowledge, reasoning, mathematics, code, language, several languages"',
        "",
        "[defaults]",
        'harness = "lm_eval"',
    ]
    for r in ROWS:
        lines += ["", "[[task]]", f'name = "{r.name}"', f'metric = "{r.metric}"', f'licence = "{r.licence}"']
        if r.shots:
            lines.append(f"shots = {r.shots}")
        lines += [
            "[task.prior]", f"samples = {r.samples}", f"requests_per_sample = {r.requests}.0", f"prompt_chars = {r.chars}.0",
            f"output_tokens = {r.tokens}.0", f"seconds = {r.seconds:.1f}", "model_b = 7.0", "spread = 1.6", f"score_s = {r.score_s:.1f}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
    print(
        f"{OUT}: {len(ROWS)} tasks, {sum(r.seconds for r in ROWS):.0f} s of inference, {sum(r.score_s for r in ROWS):.0f} s of metrics"
    )
