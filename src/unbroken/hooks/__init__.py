"""Everyone else's trainer: checkpoints, progress, graceful stop and the place in the data, by one or two lines.

One file a trainer: `transformers`, `accelerate`, `lightning`, `torchft`, `deepspeed`, `torchtitan`, `megatron`. Each imports its
framework, and is imported by nobody else. What they share: `training` (what happens at the end of a step) and `steps` (the loader that knows when
that is). docs/trainers.md says what each gives.
"""
