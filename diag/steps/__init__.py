"""How long steps take and why: slow ranks, slow-downs, stalls at intervals, what the time goes into."""
