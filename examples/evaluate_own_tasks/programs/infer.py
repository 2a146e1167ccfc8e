"""Small programs, several tries each: pass@1 and pass@3 from five samples."""

TRIES = 5


def prompt(row):
    """A list asks several times; equal prompts are drawn with seeds of their own."""
    asked = {"prompt": f"{row['ask']}\n```python\n", "max_tokens": 256, "stop": ["```"], "temperature": 0.8}
    return [asked] * TRIES
