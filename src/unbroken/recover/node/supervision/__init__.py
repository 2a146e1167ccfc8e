"""An agent and its supervisors: who they are, beats and leases, the clocks between them, what is reported."""
