"""Kubernetes as a cluster: a pod for each node of a run.

options, manifest    what may be asked, and the pod that is made of it
api, reflection      the API, its refusals in words, and lists that are kept as they are there
conditions           what the state of a pod or a node means, in words
rights               what we may do there, and what is wrong before anything starts
pod                  our programs in a pod: for agent and keeper, for the ranks, and from the one to the other
link                 a node's program as the supervisor reaches it: by exec
pods, watching       the run's pods; what becomes of them and of their nodes as events
cordons              nodes out of use
cluster              the contract
"""
