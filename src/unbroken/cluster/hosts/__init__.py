"""Hosts without a scheduler, reached over ssh.

options     what may be asked of them, and the list of hosts
program     what runs on each host for as long as the connection stands: starts the agent, reports, fences
reported    what programs on hosts report of their agents, as events
connection  one host as it is reached, again after each break
cluster     the contract over all of them
"""
