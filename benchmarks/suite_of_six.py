"""A suite of six tasks for lm-evaluation-harness with prompts and answers of real lengths, and a model of real size to ask: nothing
is downloaded, and the model knows nothing. `engines.py` runs both."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

SIX = ("six_choice", "six_cloze", "six_rolling", "six_short", "six_reason", "six_pairs")
"""Five-shot multiple choice, a last word, perplexity, short answers behind three examples, long answers, choices without examples."""
SIZES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16, "num_key_value_heads": 4},
    "6b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
SAVE = """
import sys, json, torch
from transformers import LlamaConfig, LlamaForCausalLM
folder, sizes = sys.argv[1], json.loads(sys.argv[2])
old = LlamaConfig.from_pretrained(folder)
config = LlamaConfig(vocab_size=32000, max_position_embeddings=4096, bos_token_id=old.bos_token_id, eos_token_id=old.eos_token_id, **sizes)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
model.save_pretrained(folder)
"""


def write_model(folder: Path, size: str) -> Path:
    """A Llama of random weights in bfloat16, drawn on the GPU, with the tiny tokenizer."""
    from tests.support.tiny_model import write_tiny_model

    write_tiny_model(folder, context=4096)
    (folder / "model.safetensors").unlink()
    subprocess.run([sys.executable, "-c", SAVE, str(folder), json.dumps(SIZES[size])], check=True)
    return folder


def write_suite(folder: Path, documents: int, *, shorter: float = 1.0) -> None:
    """The YAML files and their data; `documents` of each task, a quarter of that where answers are long."""
    from tests.support.tiny_tasks import WORDS

    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(11)

    def words(low: int, high: int) -> str:
        n = rng.randint(max(1, int(low * shorter)), max(2, int(high * shorter)))
        return " ".join(rng.choice(WORDS) for _ in range(n))

    def choice() -> dict[str, Any]:
        return {
            "question": words(40, 110),
            "choices": [words(2, 8) for _ in range(4)],
            "answer": rng.randrange(4),
        }

    def question() -> dict[str, Any]:
        return {"question": words(60, 300), "answer": words(1, 4)}

    _rows(folder, "choice_train", [choice() for _ in range(8)])
    _rows(folder, "choice", [choice() for _ in range(documents)])
    _rows(folder, "pairs", [choice() for _ in range(documents)])
    _rows(folder, "question_train", [question() for _ in range(8)])
    _rows(folder, "short", [question() for _ in range(documents)])
    _rows(folder, "reason", [question() for _ in range(max(8, documents // 2))])
    _rows(folder, "cloze", [{"text": words(30, 90), "last": rng.choice(WORDS)} for _ in range(documents)])
    _rows(folder, "page", [{"page": words(150, 900)} for _ in range(max(8, documents // 4))])
    for name, text in _tasks(folder, shorter).items():
        (folder / f"{name}.yaml").write_text(text)


def _rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def _tasks(folder: Path, shorter: float) -> dict[str, str]:
    def head(name: str, kind: str, test: str, shots: str = "", number: int = 0) -> str:
        files = f"    test: {folder}/{test}.jsonl\n" + (
            f"    train: {folder}/{shots}.jsonl\n" if shots else ""
        )
        more = f"training_split: train\nfewshot_split: train\nnum_fewshot: {number}\n" if shots else ""
        return (f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n{files}test_split: test\n{more}"
                f"output_type: {kind}\nmetadata:\n  version: 1.0\n")  # fmt: skip

    def mean(name: str) -> str:
        return f"  - metric: {name}\n    aggregation: mean\n    higher_is_better: true\n"

    choices = (
        'doc_to_text: "{{question}}\\nAnswer:"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\nmetric_list:\n'
        + mean("acc")
        + mean("acc_norm")
    )
    answers = 'doc_to_text: "{{question}}"\ndoc_to_target: answer\nmetric_list:\n' + mean("exact_match")

    def limit(tokens: int) -> str:
        return f'generation_kwargs:\n  until: ["\\n\\n"]\n  max_gen_toks: {max(4, int(tokens * shorter))}\n  do_sample: false\n'

    return {
        "six_choice": head("six_choice", "multiple_choice", "choice", "choice_train", 5) + choices,
        "six_pairs": head("six_pairs", "multiple_choice", "pairs") + choices,
        "six_cloze": head("six_cloze", "loglikelihood", "cloze") + 'doc_to_text: "{{text}}"\ndoc_to_target: " {{last}}"\nmetric_list:\n'
        + "  - metric: perplexity\n    aggregation: perplexity\n    higher_is_better: false\n" + mean("acc"),
        "six_rolling": head("six_rolling", "loglikelihood_rolling", "page") + 'doc_to_text: ""\ndoc_to_target: page\nmetric_list:\n'
        + "".join(f"  - metric: {m}\n" for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")),
        "six_short": head("six_short", "generate_until", "short", "question_train", 3) + answers + limit(32),
        "six_reason": head("six_reason", "generate_until", "reason") + answers + limit(256),
    }  # fmt: skip
