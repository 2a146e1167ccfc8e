"""Right or wrong."""


def score(row, output):
    """True, False, a number, or several numbers by name."""
    return output.strip() == str(row["a"] + row["b"])
