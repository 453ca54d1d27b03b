"""`pdtrain diag comm`: what the links between the ranks of a job carry, measured.

`records` are the nouns (probe.json), `ask` what the user wants; `start` makes a job of this machine, `rank` is one rank
of it: a control thread (`control`: heartbeats over the store), a thread that measures (`sweep`, `operations`, `groups`,
`hierarchy`, `overlap`, `payload`), and a main thread that never waits for the network. `judge` turns the records into
findings, `table` and `report` show them; these four import no torch.
"""
