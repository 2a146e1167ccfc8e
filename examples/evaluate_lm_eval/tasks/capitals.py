"""The data: written here, so that the example needs no network. Yours would come from files or from the hub."""

import datasets

PAIRS = [
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Norway", "Oslo"), ("Egypt", "Cairo"),
    ("Japan", "Tokyo"), ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Cuba", "Havana"), ("Greece", "Athens"),
    ("Austria", "Vienna"), ("Chile", "Santiago"), ("Ghana", "Accra"), ("Iraq", "Baghdad"), ("Latvia", "Riga"),
    ("Nepal", "Kathmandu"), ("Poland", "Warsaw"), ("Qatar", "Doha"), ("Senegal", "Dakar"), ("Sweden", "Stockholm"),
]  # fmt: skip


def load(**metadata):
    """Splits with a country, its capital, and four choices; `metadata` is the task's own."""

    def row(i):
        country, capital = PAIRS[i]
        choices = [PAIRS[(i + step) % len(PAIRS)][1] for step in (0, 3, 7, 11)]
        right = i % 4
        choices[0], choices[right] = choices[right], choices[0]
        return {"country": country, "capital": capital, "choices": choices, "right": right}

    rows = [row(i) for i in range(len(PAIRS))]
    return {"train": datasets.Dataset.from_list(rows[:5]), "test": datasets.Dataset.from_list(rows[5:])}
