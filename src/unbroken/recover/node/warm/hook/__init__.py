"""Nothing but `sitecustomize`: this folder goes in front of a rank's PYTHONPATH."""
