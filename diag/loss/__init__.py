"""What a loss curve says: where it left its course, what kind of departure that was, and what moved first.

`findings.findings_of(run)` is the entry; `events` finds excursions, `signals` everything that is no excursion (NaN,
loss scale, plateau, oscillation), `blame` looks at the gradient norm, the learning rate and the batches at an onset.
docs/loss.md describes the method and its limits.
"""
