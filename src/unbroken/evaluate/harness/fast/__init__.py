"""The fast way to ask a model of transformers: requests of many blocks and tasks at once, in batches of this card's size.

prefixes.py      which tokens are shared, and batches by a budget of tokens (pure)
likelihoods.py   log-probabilities, each shared prefix computed once
continuous.py    generation by transformers' continuous batching
budget.py        how many tokens a batch should hold on this device, measured
model.py         the model that the worker feeds; generation in static batches where continuous batching cannot

The arithmetic of one sequence is the harness's; what it shares its batch with is not. So the last digits may differ from
those of `--exact`, which is `transformers_model.py` alone; a sample of each task is answered both ways, and compared.
"""
