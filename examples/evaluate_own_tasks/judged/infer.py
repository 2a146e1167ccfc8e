"""Short messages that a second model will judge."""


def prompt(row):
    return f"{row['request']}\nMessage:"
