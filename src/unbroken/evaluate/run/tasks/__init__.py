"""The tasks of an evaluation: checked, prepared, answered, handed to scoring."""
