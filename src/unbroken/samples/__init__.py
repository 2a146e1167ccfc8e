"""The schema that traces and telemetry share, and wide tables counted."""
