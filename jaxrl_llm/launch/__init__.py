"""Runs of several processes: how one joins (`joining`), and how those of one machine are started and watched."""
