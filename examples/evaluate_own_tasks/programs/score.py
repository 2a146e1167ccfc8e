"""Each program is run with its tests in the sandbox: no network, no files of ours, limited memory and time."""

from unbroken.evaluate.scoring.code import extract_code, pass_at_k, passes


def score(row, output):
    """`output` is the list of all tries."""
    passed = sum(passes(extract_code(text), row["tests"]) for text in output)
    return {f"pass@{k}": pass_at_k(len(output), int(passed), k) for k in (1, 3)}
