"""Following a run while it goes: growing files, the detectors of the post-mortem, alarms raised and cleared."""
