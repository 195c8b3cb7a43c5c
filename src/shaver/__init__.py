"""Bayesian sparsification of neural networks: train with the evidence, prune by the posterior."""

__version__ = "0.1.0"
