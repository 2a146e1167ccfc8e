"""Slurm's controller: its commands, what they print as data, and the drains that they order.

hostlist, records      what the commands print (pure)
commands               the commands, each with a deadline
cordons                what a drain's text says of its owner and its expiry (pure)
draining               drains and gives back
"""
