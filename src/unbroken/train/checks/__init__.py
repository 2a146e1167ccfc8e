"""What a trainer looks at of its own steps before it applies them."""
