"""Attention of prompts laid end to end in one row, also on top of cached pages. Start with `api.py`."""
