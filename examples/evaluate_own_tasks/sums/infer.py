"""Sums of two numbers: the rows are made here, so there is no data.jsonl."""


def rows():
    """One row a sample; any JSON will do."""
    return [{"a": a, "b": b} for a in range(3, 30, 3) for b in range(1, 50, 7)]


def prompt(row):
    """What the model is to continue, and when it is to stop."""
    return {"prompt": f"7 + 5 = 12\n{row['a']} + {row['b']} =", "max_tokens": 8, "stop": ["\n"]}
