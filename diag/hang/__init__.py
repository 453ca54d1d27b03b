"""Who do the others wait for? Flight-recorder dumps of all ranks -> a verdict. Pure functions over what was read.

    job = groups.build(dumps, unreadable)      one group per member set, whatever each rank calls it
    items = frontier.items(job)                what is waited in, per group: who came, who did not
    items += pairing.items(job)                sends without receives, and the reverse
    analyse.analyse(job)                       wait-for graph over both; its sinks and cycles are the verdict

docs/hang.md tells the method with its limits.
"""
