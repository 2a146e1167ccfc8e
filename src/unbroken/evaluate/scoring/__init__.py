"""Scoring apart from inference: CPU workers, a sandbox for generated code, judges.

pool.py      CPU workers; a job starts when a task's last block has landed
worker.py    one worker: jobs in, scores out, one sample at a time under watch
watch.py     which sample is being scored, for whoever must kill a scorer that hangs
sandbox.py   runs a command without network, with limits on memory, time, processes and files
code.py      generated programs and their tests, in the sandbox
judge.py     a language model as judge: retries, rate limits, unscored apart from wrong
"""
