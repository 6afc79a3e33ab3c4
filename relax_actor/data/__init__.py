"""Rows in, prompts out: `dataset` reads and checks, `template` makes tokens, `stream` orders.

Only `template` imports transformers, and only when an encoder is made.
"""
