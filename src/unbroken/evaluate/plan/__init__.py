"""Who gets what, in which order, and how long it will take."""
