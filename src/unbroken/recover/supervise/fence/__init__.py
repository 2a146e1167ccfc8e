"""How nodes are left, and what is proven of it."""
