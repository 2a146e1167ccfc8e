"""The nodes of a run: where their agents come in, and what is asked of them."""
