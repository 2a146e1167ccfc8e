"""Every committed checkpoint of a run, evaluated as it appears."""
