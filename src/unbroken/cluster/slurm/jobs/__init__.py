"""A run as a batch job.

submission     from a login node: submits, shows what becomes of the job
batch          the program of the job: runs the run, and has it go on in another job
"""
