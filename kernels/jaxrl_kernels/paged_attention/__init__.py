"""Attention of one new token per sequence over a paged KV cache. Start with `api.py`."""
