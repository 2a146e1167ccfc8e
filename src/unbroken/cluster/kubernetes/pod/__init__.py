"""Our programs in a pod.

node    in the container of agent and keeper
ranks   in the container of the ranks
door    from the one into the other
place   where they meet
"""
