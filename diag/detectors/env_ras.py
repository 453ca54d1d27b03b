"""NCCL RAS reports: ranks that are missing from a communicator, or are about to leave it.

Sees: members that no longer answer, and members in error. Cannot see: why; RAS counts what was launched, not what was
completed, so counts that differ in one report are shown and not judged (NVIDIA: ask again and compare).
"""

from __future__ import annotations

from collections.abc import Iterator

from diag.artefacts import Artefacts
from diag.artefacts.nccl_ras import Communicator, Member, NcclRas
from diag.detectors import NotChecked, detector
from diag.probes.host_words import plural
from diag.schema import Evidence, Finding, Where

_FINE = {"", "0", "none", "success", "ncclsuccess", "no error", "in progress", "ncclinprogress", "7"}


@detector("env", needs=NcclRas, subject="NCCL RAS reports")
def env_nccl_ras(artefacts: Artefacts) -> Iterator[Finding | NotChecked]:
    """One finding per communicator with missing or failing members."""
    for item in artefacts.of(NcclRas):
        largest = max([item.size, *(c.size for c in item.communicators)])
        yield from silent(item)
        yield from different(item)
        for communicator in item.communicators:
            yield from missing(item.path, communicator, world=communicator.size == largest)
            yield from failing(item.path, communicator)
            yield from behind(item.path, communicator)
        kind = "communicator group" if item.groups else "communicator"
        count = plural(item.groups or len(item.communicators), kind)
        yield Finding(cause="host_checked", role="context", severity="info", confidence=1.0, where=Where(),
                      summary=f"{item.path}: NCCL {item.version}, {count}, the largest of {largest} ranks",
                      evidence=[Evidence(path=item.path, text=f"NCCL {item.version}")],
                      numbers={"standing": True})


def missing(path: str, communicator: Communicator, *, world: bool) -> Iterator[Finding]:
    """Members that do not answer. Their numbers are global ranks only in the communicator of all ranks."""
    gone = communicator.missing_ranks
    if not gone:
        return
    dead = [member for member in gone if member.status.considered_dead]
    shown = dead or gone
    words = "dead" if dead else "not answering"
    named = ", ".join(f"rank {m.rank}" + (f" ({m.host} pid {m.pid})" if m.host else "") for m in shown[:4])
    yield Finding(cause="collective_missing_rank", severity="error" if dead else "warning",
                  confidence=0.85 if dead else 0.6,
                  summary=f"NCCL considers {len(shown)} of {communicator.size} ranks {words}: {named}"
                          + (" and more" if len(shown) > 4 else ""),
                  where=Where(ranks=sorted(m.rank for m in shown if m.rank is not None) if world else [],
                              hosts=sorted({m.host for m in shown if m.host}), group=str(communicator.hash) or None),
                  evidence=[Evidence(path=path, text=f"missing_ranks: {_say(m)}", rank=m.rank if world else None)
                            for m in shown[:8]],
                  numbers={"standing": True, "missing": len(gone), "dead": len(dead), "size": communicator.size})


def silent(item: NcclRas) -> Iterator[Finding]:
    """Processes of the job from which no answer came, as the text lists them."""
    if item.silent:
        first = item.silent[0][2]
        dead = sum(bool(member.status.considered_dead) for _, _, member in item.silent)
        words = f"considers {plural(dead, 'process')} of the job dead" if dead else \
            f"got no answer from {plural(len(item.silent), 'process')} of the job"
        yield Finding(cause="collective_missing_rank", severity="error" if dead else "warning",
                      confidence=0.85 if dead else 0.6,
                      summary=f"NCCL {words}: pid {first.pid} on {first.host}"
                              + (" and more" if len(item.silent) > 1 else ""),
                      where=Where(hosts=sorted({member.host for _, _, member in item.silent})),
                      evidence=[Evidence(path=item.path, text=text, line=line) for line, text, _ in item.silent[:8]],
                      numbers={"standing": True, "missing": len(item.silent), "dead": dead})


def different(item: NcclRas) -> Iterator[Finding]:
    """Ranks that launched more or fewer of an operation than the others: a remark, for the reason given above."""
    for row in item.behind:
        counts = ", ".join(f"{ranks:,} ranks up to {count:,}" for ranks, count in row.counts[:4])
        late = [(member, count) for member, count in row.named if count < max(c for _, c in row.counts)]
        ahead = [(member, count) for member, count in row.named if (member, count) not in late]
        words = "; ".join(f"{what}: " + ", ".join(f"rank {m.rank} ({m.host} pid {m.pid})" for m, _ in members[:4])
                          for what, members in (("behind", late), ("ahead", ahead)) if members)
        yield Finding(cause="collective_missing_rank", role="context", severity="info", confidence=0.4,
                      summary=f"ranks of communicator {row.group} have launched different numbers of {row.operation}: "
                              f"{counts}" + (f"; {words}" if words else "") + "; ask RAS again, if the numbers stand "
                              "still the ranks behind are what the others wait for",
                      where=Where(hosts=sorted({m.host for m, _ in late}), group=row.group or None),
                      evidence=[Evidence(path=item.path, text=f"different {row.operation} operation counts",
                                         line=row.line)], numbers={"standing": True, "behind": len(late)})


def failing(path: str, communicator: Communicator) -> Iterator[Finding]:
    """Members with an asynchronous error."""
    bad = [m for m in communicator.ranks if str(m.status.async_error or "").lower() not in _FINE]
    if bad:
        yield Finding(cause="hang_undetermined", role="context", severity="warning", confidence=0.6,
                      summary=f"{len(bad)} of {communicator.size} ranks report an error of NCCL: "
                              f"{bad[0].status.async_error} (first: {_say(bad[0])})",
                      where=Where(hosts=sorted({m.host for m in bad if m.host})[:8]),
                      evidence=[Evidence(path=path, text=f"async_error {m.status.async_error}: {_say(m)}")
                                for m in bad[:6]], numbers={"standing": True, "ranks_in_error": len(bad)})


def behind(path: str, communicator: Communicator) -> Iterator[Finding]:
    """Members that launched fewer operations than the others: a remark, as one report cannot tell lag from a hang."""
    sums = {id(m): sum(m.collective_counts.values()) for m in communicator.ranks if m.collective_counts}
    if len(sums) < 2 or len(set(sums.values())) < 2:
        return
    most = max(sums.values())
    late = [m for m in communicator.ranks if sums.get(id(m), most) < most]
    if len(late) > len(sums) // 4 + 1:
        return  # RAS itself lists outliers only
    named = ", ".join(f"rank {m.rank} ({m.host}) {sums[id(m)]:,}" for m in late[:4])
    yield Finding(cause="collective_missing_rank", role="context", severity="info", confidence=0.4,
                  summary=f"fewer operations launched than the {most:,} of the others: {named}; ask RAS again, if the "
                          "numbers stand still these ranks are what the others wait for",
                  where=Where(hosts=sorted({m.host for m in late if m.host})),
                  evidence=[Evidence(path=path, text=f"collective_counts {m.collective_counts}: {_say(m)}")
                            for m in late[:6]], numbers={"standing": True, "behind": len(late)})


def _say(member: Member) -> str:
    return f"rank {member.rank} {member.host} pid {member.pid} device {member.cuda_dev}"
