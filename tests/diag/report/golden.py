"""One report with everything in it, hostile texts included: what every form must show."""

from __future__ import annotations

from diag.schema import Evidence, Finding, Input, Report, Where

HOSTILE = "[red]boom[/red] \x1b[31mESC\x07 <script>alert(1)</script> & `tick` | @team \u202etxt"


def report() -> Report:
    """A failed run of 8 ranks with victims, a table, a damaged input and something not checked."""
    log = "logs/attempt_0/{}/stderr.log"
    waiting = [0, 1, 2, 4, 5, 6, 7]
    return Report(
        verdict="failed",
        headline="Rank 3 raised FileNotFoundError while loading shard 12; 7 other ranks waited for it.",
        inputs=[
            *(Input(path=log.format(r), format="log", bytes=120_000 + r, ranks=[r], lines=1500) for r in range(8)),
            Input(path="dumps/flight_recorder_5", format="flight-recorder", bytes=8192, readable=False,
                  problem="ends after 8,192 of 41,377 bytes"),
        ],
        findings=[
            Finding(
                cause="peer_exception", role="root", severity="fatal", confidence=0.93,
                summary="Rank 3 raised FileNotFoundError while loading shard 12.", playbook="peer-exception",
                where=Where(ranks=[3], hosts=["n12"], step=120, file="train.py", line=88, time="2024-05-01T12:00:03"),
                evidence=[
                    Evidence(path=log.format(3), line=1211, rank=3, time="2024-05-01T12:00:03",
                             text="[rank3]: FileNotFoundError: [Errno 2] No such file or directory: '/data/s12.bin'"),
                    Evidence(path=log.format(3), line=1190, rank=3, text=HOSTILE),
                    Evidence(path="dumps/flight_recorder_3", offset=4096, text="last entry: ALLREDUCE 1040"),
                ],
                explains=[1, 2], numbers={"seconds_waited": 601.5},
                fix=["Restore /data/s12.bin on n12, or point data.path at the copy that the other nodes read.",
                     "Resume from the last complete checkpoint."],
            ),
            Finding(
                cause="collective_missing_rank", role="victim", severity="error", confidence=0.9,
                summary="Ranks 0-2 and 4-7 waited in ALLREDUCE 1041 of group world.",
                where=Where(ranks=waiting, group="world", time="2024-05-01T12:10:04"),
                evidence=[Evidence(path=log.format(r), line=1300 + r, rank=r, time=f"2024-05-01T12:10:0{r}",
                                   text="Watchdog caught collective operation timeout") for r in waiting],
            ),
            Finding(cause="killed_unconfirmed", role="victim", severity="error", confidence=0.6,
                    summary="The launcher stopped ranks 4 and 5.", where=Where(ranks=[4, 5])),
            Finding(cause="moe_token_drop", severity="warning", confidence=0.8, summary="Layer 3 drops 12 % of tokens.",
                    where=Where(module="router", step=90),
                    numbers={"layers": [{"layer": 3, "drop_rate": 0.1234, "drop_floor": 0.0001, "state": "a b"}]}),
            Finding(cause="input_unreadable", role="context", severity="warning", confidence=1.0,
                    summary="dumps/flight_recorder_5 could not be read: ends after 8,192 of 41,377 bytes"),
        ],
        not_checked=["pools: no pool events among the inputs"],
    )
