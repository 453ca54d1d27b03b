"""Accounting before a run: parameters, memory, FLOP and communication. No torch."""
