"""What a run writes down: verdicts, decisions, incidents, steps, and the state that its journal folds to."""
