"""The fast way to ask a model of transformers: requests of many blocks and tasks at once, in batches of this card's size.

model.py         the model that the worker feeds
prefixes.py      which tokens are shared, and batches by a budget of tokens (pure)
likelihoods.py   log-probabilities, each shared prefix computed once
waves.py         likelihoods that wait, cut into such batches
continuous.py    transformers' continuous batching
generations.py   texts by continuous batching, or in static batches where it cannot
budget.py        how many tokens a batch should hold, measured
fitting.py       what of all this the model and the device allow

The arithmetic of one sequence is the harness's; what it shares its batch with is not. So the last digits may differ from
those of `--exact`, which is `transformers_model.py` alone; a sample of each task is answered both ways, and compared.
"""
