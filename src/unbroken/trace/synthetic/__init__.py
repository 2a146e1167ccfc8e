"""Synthetic traces: marginals fitted to the published curves, the dependence between them stated."""
