"""Slurm as a cluster: nodes of a job, agents as steps of it.

hostlist, records      what Slurm's commands print, as data (pure)
commands               the commands, each with a deadline
command_lines          how something is started on a node: srun, images, set-up lines (pure)
node                   this package's program on a node
launches, watching     sruns and what becomes of them; the job and its nodes as events
survey                 what is wrong with nodes, before anything starts there
cordons, memory        nodes out of use; what a successor on this host has to know
cluster                the contract
"""
