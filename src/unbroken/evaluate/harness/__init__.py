"""Harness adapters and model backends.

lm_eval.py        lm-evaluation-harness: prompts before a GPU is taken, scores after it is released
  task_index.py     its tasks by name, groups taken apart, without the seven seconds that its own index costs
  replay.py         a model that only repeats recorded answers, and a task loader that keeps one leaf of a group
  staging.py        data sets for machines without a network
plain.py          any folder with infer.py and score.py
transformers.py   a Hugging Face folder on a GPU or CPU
openai.py         any OpenAI-compatible endpoint
lm_eval_models.py any model class of lm-evaluation-harness (its own `hf`, `vllm`, ...)
"""
