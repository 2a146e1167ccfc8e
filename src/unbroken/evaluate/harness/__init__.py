"""Harness adapters and model backends.

lm_eval/               lm-evaluation-harness: prompts before a GPU is taken, scores after it is released
  replay.py              a model that only repeats recorded answers, and a task loader that keeps one leaf of a group
  call.py                one call of its simple_evaluate
  results.py             its results as ours
  task_index.py          its tasks by name, groups taken apart, without the seven seconds that its own index costs
  staging.py             data sets for machines without a network
  groups.py              a group's score from those of its leaves
plain/                 any folder with infer.py and score.py
  folder.py              the folder, its rows, what is asked
  model.py               what infer.py gets, or a model that it loads itself
  score.py               what score.py says
asking.py, requests.py what requests and answers mean, the same for every backend
chat.py                chat templates
transformers.py        a Hugging Face folder on a GPU or CPU; transformers_model.py runs it
openai.py              any OpenAI-compatible endpoint, through link/openai.py
lm_eval_models.py      any model class of lm-evaluation-harness (its own `hf`, `vllm`, ...)
"""
