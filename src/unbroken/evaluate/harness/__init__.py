"""Harness adapters and model backends.

lm_eval.py             lm-evaluation-harness: prompts before a GPU is taken, scores after it is released
  replay.py              a model that only repeats recorded answers, and a task loader that keeps one leaf of a group
  lm_eval_call.py        one call of its simple_evaluate
  lm_eval_results.py     its results as ours
  task_index.py          its tasks by name, groups taken apart, without the seven seconds that its own index costs
  groups.py              a group's score from those of its leaves
plain.py               any folder with infer.py and score.py
  plain_folder.py        the folder, its rows, what is asked
  plain_model.py         what infer.py gets, or a model that it loads itself
  plain_score.py         what score.py says
asking.py, requests.py what requests and answers mean, the same for every backend
chat.py                chat templates
staging.py             data sets for machines without a network
transformers.py        a Hugging Face folder on a GPU or CPU; transformers_model.py runs it
openai.py              any OpenAI-compatible endpoint, through endpoint.py
lm_eval_models.py      any model class of lm-evaluation-harness (its own `hf`, `vllm`, ...)
"""
