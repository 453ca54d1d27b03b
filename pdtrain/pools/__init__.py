"""Phase separation: forward and backward on the compute ranks, optimizer state and step on the update ranks.

message.py   what one message carries, and how it is checked
links.py     one pair of ranks, one direction; its ends: sending.py, with resend, and receiving.py, with checks
plan.py      which update rank owns which part of the model, in which buckets it travels
compute.py   the compute rank's side of the exchange
feedback.py  gradients as payloads; what that takes from them is added to the next ones
update.py    the update rank: masters, moments, the step
matrices.py  whole matrices on their owner, for Muon
state.py     the update pool's state as a checkpoint sees it
run.py       joining the pools: groups, agreement at the start, the update rank's loop
keep.py      what a rank keeps in a file that survives its process; own_state.py: of a compute rank
rejoin.py    where all ranks go on after a death, and what it cost
rebalance.py how busy both pools were, at coarse boundaries, and whether another split is worth it
regroup.py   another split of the same ranks: from the ranks to the launcher, and to the next start
faults.py    faults on purpose, for tests and drills

How it is used and what is guaranteed: docs/pools.md.
"""
