"""Slurm as a cluster: nodes of a job, agents as steps of it.

cluster                the contract
controller             Slurm's commands, and what they say
jobs                   a run that submits itself as a batch job
command_lines          how something is started on a node: srun, images, set-up lines (pure)
node                   this package's program on a node
launches, watching     sruns and what becomes of them; the job and its nodes as events
survey                 what is wrong with nodes, before anything starts there
memory                 what a successor on this host has to know
"""
