"""What a training's objects hold, taken whole."""
