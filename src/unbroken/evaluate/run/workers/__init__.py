"""The workers of an evaluation: started, connected, fed."""
