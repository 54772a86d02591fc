"""Attention of packed training rows, with its gradient. Start with `api.py`."""
