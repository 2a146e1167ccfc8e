"""Slurm's controller: its commands, what they print as data, and the drains that they order.

hostlist, records      what the commands print (pure)
commands               the commands, each with a deadline
cordons                drains that carry an owner and an expiry
"""
