"""Inference engines: what samples. `base` is the contract, `scripted` its verified fake."""
