"""Tiny evaluation tasks for lm-evaluation-harness, written to a folder: every request type, no network, no GPU.

They cover what makes harnesses hard to take apart: few-shot examples drawn at random, filters with several answers
a question, metrics with a bootstrapped standard error, several metrics a document, contexts that differ a choice,
and a group whose score is a weighted mean. Each has a few dozen documents and answers in milliseconds.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NAMES = (
    "tiny_choice",
    "tiny_mutual",
    "tiny_cloze",
    "tiny_sums",
    "tiny_vote",
    "tiny_translate",
    "tiny_rolling",
    "tiny_inputs",
    "tiny_several",
    "tiny_shuffled",
    "tiny_mixed",
    "tiny_group",
)
"""The tasks, one a kind of request or metric; `tiny_group` holds two more, tiny_red and tiny_blue."""

CODE = "tiny_code"
"""A task that runs programs in the harness's own process, as lm_eval's code metrics do; scored in the sandbox only."""

PROGRAMS = (
    "passed = 1 + 1 == 2",
    "passed = 1 + 1 == 3",
    "open('/etc/unbroken-was-here', 'w')",
    "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "import os; passed = 'UNBROKEN_TEST_SECRET' in os.environ",
)
"""What it runs: one that passes, one that does not, and three that reach for what is not theirs."""

WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "islet",
    "jetty",
    "kelp",
    "larch",
    "maple",
    "north",
    "ocean",
    "pearl",
    "quartz",
    "river",
    "slate",
    "tidal",
    "umber",
    "vale",
    "willow",
    "xenon",
    "yarrow",
    "zephyr",
]


def write_tiny_tasks(folder: Path, *, documents: int = 23, seed: int = 7) -> list[str]:
    """Writes YAML tasks and their data below `folder` and returns the names that can be asked for.

    `documents` is the size of each test split; groups hold splits of different sizes. The same arguments write the
    same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    _choices(folder, "choice", rng, documents)
    _choices(folder, "red", rng, documents // 2 + 3)
    _choices(folder, "blue", rng, documents + 5)
    _pairs(folder, rng, documents)
    _sums(folder, rng, documents)
    _texts(folder, rng, documents)
    _rows(folder, "programs_test", [{"prompt": f"program {i}", "program": p} for i, p in enumerate(PROGRAMS)])
    for name, text in _yaml(folder).items():
        (folder / f"{name}.yaml").write_text(text)
    (folder / "tiny_helpers.py").write_text(_HELPERS)
    return list(NAMES)


def _rows(folder: Path, name: str, rows: list[dict[str, object]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def _choices(folder: Path, name: str, rng: random.Random, documents: int) -> None:
    def row() -> dict[str, object]:
        options = rng.sample(WORDS, 4)
        query = " ".join(rng.sample(WORDS, rng.randint(3, 9)))
        return {"question": f"Which word fits: {query}?", "choices": options, "answer": rng.randrange(4)}

    _rows(folder, f"{name}_train", [row() for _ in range(12)])
    _rows(folder, f"{name}_test", [row() for _ in range(documents)])


def _pairs(folder: Path, rng: random.Random, documents: int) -> None:
    def row() -> dict[str, object]:
        words = rng.sample(WORDS, rng.randint(4, 12))
        return {"text": " ".join(words[:-1]), "last": words[-1]}

    _rows(folder, "pairs_test", [row() for _ in range(documents)])


def _sums(folder: Path, rng: random.Random, documents: int) -> None:
    def row() -> dict[str, object]:
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return {"question": f"{a} + {b} =", "answer": str(a + b)}

    _rows(folder, "sums_train", [row() for _ in range(12)])
    _rows(folder, "sums_test", [row() for _ in range(documents)])


def _texts(folder: Path, rng: random.Random, documents: int) -> None:
    def row() -> dict[str, object]:
        return {"page": " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))}

    _rows(folder, "texts_test", [row() for _ in range(documents)])


def _yaml(folder: Path) -> dict[str, str]:
    def data(**splits: str) -> str:
        files = "".join(f"    {split}: {folder / (stem + '.jsonl')}\n" for split, stem in splits.items())
        return f"dataset_path: json\ndataset_kwargs:\n  data_files:\n{files}"

    def choice(name: str, stem: str, more: str = "") -> str:
        return f"""task: {name}
{data(train=stem + "_train", test=stem + "_test")}training_split: train
test_split: test
fewshot_split: train
num_fewshot: 2
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metadata:
  version: 1.0
{more}"""

    means = "\n    aggregation: mean\n    higher_is_better: true"
    return {
        "tiny_choice": choice(
            "tiny_choice",
            "choice",
            f"metric_list:\n  - metric: acc{means}\n  - metric: acc_norm{means}\n"
            "  - metric: brier_score\n    higher_is_better: false\n",
        ),
        "tiny_mutual": choice(
            "tiny_mutual",
            "choice",
            f"metric_list:\n  - metric: acc{means}\n  - metric: acc_mutual_info{means}\n  - metric: mcc\n",
        ),
        "tiny_red": choice(
            "tiny_red", "red", f"metric_list:\n  - metric: acc{means}\n  - metric: acc_norm{means}\n"
        ),
        "tiny_blue": choice(
            "tiny_blue", "blue", f"metric_list:\n  - metric: acc{means}\n  - metric: acc_norm{means}\n"
        ),
        "tiny_group": """group: tiny_group
task:
  - tiny_red
  - tiny_blue
aggregate_metric_list:
  - metric: acc
    aggregation: mean
    weight_by_size: true
  - metric: acc_norm
    aggregation: mean
    weight_by_size: false
metadata:
  version: 2
""",
        "tiny_cloze": f"""task: tiny_cloze
{data(test="pairs_test")}test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text}}}}"
doc_to_target: " {{{{last}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc{means}
metadata:
  version: 1.0
""",
        "tiny_sums": f"""task: tiny_sums
{data(train="sums_train", test="sums_test")}training_split: train
test_split: test
fewshot_split: train
num_fewshot: 3
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
  do_sample: false
filter_list:
  - name: strict
    filter:
      - function: regex
        regex_pattern: "^\\\\s*(\\\\d+)$"
      - function: take_first
  - name: flexible
    filter:
      - function: regex
        regex_pattern: "(\\\\d+)"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match{means}
    ignore_case: true
metadata:
  version: 3.0
""",
        "tiny_vote": f"""task: tiny_vote
{data(test="sums_test")}test_split: test
output_type: generate_until
repeats: 5
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
  do_sample: true
  temperature: 0.5
filter_list:
  - name: majority
    filter:
      - function: regex
        regex_pattern: "(\\\\d+)"
      - function: majority_vote
      - function: take_first
  - name: first
    filter:
      - function: take_first
metric_list:
  - metric: exact_match{means}
metadata:
  version: 1.0
""",
        "tiny_translate": f"""task: tiny_translate
{data(test="pairs_test")}test_split: test
output_type: generate_until
doc_to_text: "Repeat: {{{{text}}}}"
doc_to_target: text
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
metric_list:
  - metric: bleu
  - metric: chrf
metadata:
  version: 1.0
""",
        "tiny_rolling": f"""task: tiny_rolling
{data(test="texts_test")}test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: page
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
metadata:
  version: 1.0
""",
        "tiny_inputs": f"""task: tiny_inputs
{data(train="choice_train", test="choice_test")}training_split: train
test_split: test
fewshot_split: train
num_fewshot: 1
output_type: multiple_choice
doc_to_text: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: acc{means}
metadata:
  version: 1.0
""",
        "tiny_code": f"""task: tiny_code
{data(test="programs_test")}test_split: test
output_type: generate_until
unsafe_code: true
doc_to_text: "{{{{prompt}}}}"
doc_to_target: program
process_results: !function tiny_helpers.execute
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
metric_list:
  - metric: passed{means}
metadata:
  version: 1.0
""",
        "tiny_shuffled": f"""task: tiny_shuffled
{data(train="choice_train", test="choice_test")}training_split: train
test_split: test
process_docs: !function tiny_helpers.shuffled
num_fewshot: 2
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc{means}
metadata:
  version: 1.0
""",
        "tiny_mixed": f"""task: tiny_mixed
class: !function tiny_helpers.Mixed
{data(test="sums_test")}test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metadata:
  version: 1.0
""",
        "tiny_several": f"""task: tiny_several
{data(test="sums_test")}test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
process_results: !function tiny_helpers.several
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 24
metric_list:
  - metric: right{means}
  - metric: digits{means}
  - metric: far
    aggregation: !function tiny_helpers.worst
    higher_is_better: false
metadata:
  version: 1.0
""",
    }


_HELPERS = '''\
"""What the tiny tasks compute themselves."""

import random

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask


class Mixed(ConfigurableTask):
    """Two kinds of request a document, in Python: an answer, and how sure the model is of the right one."""

    VERSION = 4

    def __init__(self, config=None):
        super().__init__(config={k: v for k, v in config.items() if k != "class"})

    def construct_requests(self, doc, ctx, **kwargs):
        kwargs.pop("apply_chat_template", None), kwargs.pop("chat_template", None)
        settings = dict(self.config.generation_kwargs)
        return [
            Instance("generate_until", doc, (ctx, settings), 0, **kwargs),
            Instance("loglikelihood", doc, (ctx, " " + doc["answer"]), 1, **kwargs),
            Instance("loglikelihood", doc, (ctx, " 0"), 2, **kwargs),
        ]

    def process_results(self, doc, results):
        text, right, zero = results
        return {"exact": float(text.strip() == doc["answer"]), "sure": right[0] - zero[0]}

    def aggregation(self):
        return {"exact": mean, "sure": mean}

    def higher_is_better(self):
        return {"exact": True, "sure": True}


def shuffled(dataset):
    """Draws from Python's global generator, as some published tasks do: prompts then depend on when they are built."""

    def shuffle(doc):
        right = doc["choices"][doc["answer"]]
        choices = random.sample(doc["choices"], len(doc["choices"]))
        return {**doc, "choices": choices, "answer": choices.index(right)}

    return dataset.map(shuffle)


def several(doc, results):
    digits = "".join(c for c in results[0] if c.isdigit())
    value = int(digits[:6] or 0)
    return {
        "right": float(digits == doc["answer"]),
        "digits": float(len(digits)),
        "far": abs(value - int(doc["answer"])),
    }


def worst(items):
    return max(items)


def execute(doc, results):
    seen = {}
    try:
        exec(doc["program"], seen)
    except Exception:
        return {"passed": 0.0}
    return {"passed": float(seen.get("passed", 1.0))}
'''
