"""Reasoning about console logs: from the facts of all of them together to what broke. Pure functions, no I/O."""
