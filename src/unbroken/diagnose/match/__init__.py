"""Lines as events: rules, and the one pass that finds what they name."""
