"""Where rules do not decide: past incidents, and a language model."""
