"""What a run writes down: verdicts, decisions, incidents, candidates, steps, and the state that its journal folds to."""
