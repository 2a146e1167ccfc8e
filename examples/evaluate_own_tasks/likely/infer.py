"""Which ending is likelier? The model is asked for log-probabilities, not for text."""

ROWS = [
    ("Rain falls from the", [" clouds", " carpet", " spoon"], 0),
    ("At night one sees the", [" breakfast", " stars", " alphabet"], 1),
    ("A triangle has three", [" months", " wheels", " sides"], 2),
    ("Ice is frozen", [" music", " water", " wood"], 1),
]


def rows():
    return [{"context": c, "choices": e, "right": r} for c, e, r in ROWS]


def prompt(row):
    return {"context": row["context"], "choices": row["choices"]}
