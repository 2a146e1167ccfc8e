"""Commands about the machines below: their nodes, what each can do, whether it is fit."""
