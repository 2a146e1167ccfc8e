"""The likeliest ending, and the likeliest per character, as two metrics."""


def score(row, output):
    """`output` holds [log-probability, is it the greedy continuation] for each choice."""
    plain = [o[0] for o in output]
    per_character = [o[0] / len(c) for o, c in zip(output, row["choices"], strict=True)]
    return {
        "acc": plain.index(max(plain)) == row["right"],
        "acc_norm": per_character.index(max(per_character)) == row["right"],
    }
