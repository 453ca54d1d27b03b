"""Is what crosses whole and of the right version: checksums, weight versions, staleness.

Version faults hide at small scale, where queues are short: the trainer's check is always on, and so is this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from diag.artefacts.pool_records import Trouble
from diag.pools.gather import COMPUTE, NOUN, UPDATE, Job, Member, stamp
from diag.pools.members import GROUP
from diag.schema import Evidence, Finding, Severity, Where

#: Words for what was done about a message of another version.
ACTIONS = {"recompute": "computed again with current weights", "drop": "dropped", "accept": "accepted",
           "refuse": "refused", "resend": "sent again"}
MOST_EVIDENCE = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """One kind of trouble with what `sender` sent, as `receiver` recorded it."""

    receiver: Member
    sender: int
    trouble: Trouble


def _seen(job: Job, name: str) -> list[Seen]:
    found = [Seen(member, t.peer, t) for _, member in sorted(job.members.items())
             for t in member.pool.trouble(name) if t.peer is not None]
    return sorted(found, key=lambda item: item.trouble.time or 0.0)


def guilty(seen: Sequence[Seen]) -> list[int]:
    """Who the pairs have in common: one sender to several receivers, or one receiver of several; else the senders."""
    senders, receivers = {s.sender for s in seen}, {s.receiver.rank for s in seen}
    if len(senders) > 1 and len(receivers) == 1:
        return sorted(receivers)
    return sorted(senders)


def corrupt(job: Job) -> Iterator[Finding]:
    """Payloads that arrived damaged: between whom, in which direction, how often, and whether they were mended."""
    seen = _seen(job, "pool_checksum_error")
    counted = sum(m.pool.totals.get("checksum_errors", 0.0) for m in job.members.values())
    if not seen and not counted:
        return
    if not seen:  # counters alone: the events were lost
        receivers = [rank for rank, m in sorted(job.members.items()) if m.pool.totals.get("checksum_errors")]
        yield Finding(cause="pool_payload_corrupt", severity="warning", confidence=0.6,
                      summary=f"{counted:.0f} message{'s' if counted > 1 else ''} arrived damaged at "
                              f"{job.name(receivers)}; which link is not recorded.",
                      where=Where(hosts=job.hosts(receivers), group=GROUP),
                      evidence=[_counter(job.members[rank]) for rank in receivers[:3]])
        return
    total = sum(s.trouble.count for s in seen)
    ranks, first = guilty(seen), seen[0]
    fatal = _refused(job, "checksum")
    mended = "The run ended of it." if fatal else "Each was found by its checksum and asked for again; none was " \
        "applied."
    sent = sum(m.pool.totals.get("messages_sent", 0.0) for m in job.members.values())
    yield Finding(
        cause="pool_payload_corrupt", severity="fatal" if fatal else "warning", confidence=0.9,
        summary=f"{total} message{'s' if total > 1 else ''} arrived damaged: {pairs_text(seen)}. {mended}",
        where=_where(job, ranks, first), evidence=_proof(seen),
        numbers={"errors": total, "messages": int(sent), "pairs": _rows(seen)},
    )


def mismatched(job: Job) -> Iterator[Finding]:
    """Messages of another weight version or incarnation, and update ranks that disagree on the version."""
    seen = _seen(job, "pool_version_mismatch")
    within = [s for s in seen if _accepted_within(job, s)]
    seen = [s for s in seen if s not in within]
    if seen:
        yield _mismatch(job, seen)
    different = _disagree(job)
    if different is not None:
        step, versions = different
        ranks = _odd(versions)
        yield Finding(
            cause="pool_version_mismatch", severity="error", confidence=0.85,
            summary=f"The update ranks hold weights of different versions at step {step:,}: "
                    + ", ".join(f"rank {rank} {version:g}" for rank, version in sorted(versions.items())) + ".",
            where=Where(ranks=ranks, hosts=job.hosts(ranks), group=GROUP, step=step),
            evidence=[_version_evidence(job.members[rank], version) for rank, version in sorted(versions.items())[:4]],
            numbers={"versions": {str(rank): version for rank, version in versions.items()}})


def _mismatch(job: Job, seen: list[Seen]) -> Finding:
    total = sum(s.trouble.count for s in seen)
    ranks, first = guilty(seen), seen[0]
    actions: dict[str, int] = {}
    for item in seen:
        for action, count in item.trouble.actions.items():
            actions[action] = actions.get(action, 0) + count
    fatal = _refused(job, "version")
    applied = "accept" in actions
    severity: Severity = "fatal" if fatal else "error" if applied else "warning"
    record = first.trouble.first
    versions = f": version {record['version']} came, {record['expected']} was expected" \
        if _whole(record.get("version")) and _whole(record.get("expected")) else ""
    started = ""
    if _whole(record.get("incarnation")) and record.get("incarnation") != record.get("expected_incarnation"):
        started = f"; it belongs to an earlier start of the peer (incarnation {record['incarnation']}, expected " \
                  f"{record.get('expected_incarnation')})"
    done = ", ".join(f"{count} {ACTIONS.get(action, action)}" for action, count in actions.items())
    end = " Nothing of a wrong version was applied." if actions and not applied else ""
    end += " The run ended of it." if fatal else ""
    return Finding(
        cause="pool_version_mismatch", severity=severity, confidence=0.9,
        summary=f"{total} message{'s' if total > 1 else ''} of another weight version: {pairs_text(seen)}{versions}"
                f"{started}{'; ' + done if done else ''}.{end}",
        where=_where(job, ranks, first), evidence=_proof(seen),
        numbers={"mismatches": total, "actions": actions, "pairs": _rows(seen)},
    )


#: What came otherwise than it was sent, in words: the receiver records the first two, the sender the third.
ODD = {"pool_duplicate": "twice", "pool_reordered": "after a later one", "pool_late": "late"}


def delivered(job: Job) -> Iterator[Finding]:
    """At most one finding: messages that came late, twice or out of order. Nothing wrong follows from them."""
    words, every, proof = [], [], []
    for name, what in ODD.items():
        seen = items = _seen(job, name)
        if name == "pool_late":  # the sender has recorded it, of itself
            items = [Seen(job.members[s.sender], s.receiver.rank, s.trouble) for s in seen if s.sender in job.members]
        if not items:
            continue
        slowest = _slowest(items) if name == "pool_late" else None
        took = f", {slowest:.3g} s until answered" if slowest is not None else ""
        words.append(f"{sum(s.trouble.count for s in items)} {what} ({pairs_text(items)}{took})")
        every += items
        proof += _proof(seen) if name != "pool_late" else [
            Evidence(path=s.receiver.log.path, line=s.trouble.line, rank=s.receiver.rank, time=stamp(s.trouble.time),
                     text=f"step {s.trouble.step}: pool_late, to rank {s.sender}") for s in seen[:MOST_EVIDENCE]]
    if not every:
        return
    total = sum(s.trouble.count for s in every)
    yield Finding(
        cause="pool_delivery", severity="info", confidence=0.8, where=_where(job, guilty(every), every[0]),
        summary=f"{total} message{'s' if total > 1 else ''} came otherwise than sent: {'; '.join(words)}. Each was "
                "recognised, and nothing was applied twice or in another order.",
        evidence=proof[:MOST_EVIDENCE], numbers={"messages": total, "pairs": _rows(every)},
    )


def _slowest(items: Sequence[Seen]) -> float | None:
    values = [s.trouble.first.get("seconds") for s in items]
    return max((v for v in values if isinstance(v, (int, float)) and 0 <= v < 1e9), default=None)


def _accepted_within(job: Job, seen: Seen) -> bool:
    """Whether all of these were accepted within the staleness that the run allows: no trouble at all."""
    record = seen.trouble.first
    version, expected = record.get("version"), record.get("expected")
    if set(seen.trouble.actions) != {"accept"} or not job.bound or not _whole(version) or not _whole(expected):
        return False
    assert isinstance(version, int) and isinstance(expected, int)
    return 0 <= expected - version <= job.bound


def _disagree(job: Job) -> tuple[int, dict[int, float]] | None:
    """The first step after which update ranks had different versions, and those; from bins that all filled alike."""
    columns = {m.rank: times for m in job.pool(UPDATE) if (times := m.pool.times.get("version")) is not None}
    if len(columns) < 2 or len({times.width for times in columns.values()}) > 1:
        return None
    width = next(iter(columns.values())).width
    for number in sorted(set.intersection(*(set(times.bins) for times in columns.values()))):
        bins = {rank: times.bins[number] for rank, times in columns.items()}
        if len({count for _, count in bins.values()}) == 1 and len({total for total, _ in bins.values()}) > 1:
            return number * width, {rank: total / count for rank, (total, count) in bins.items()}
    return None


def _odd(versions: dict[int, float]) -> list[int]:
    """Those that differ from what most hold; nobody where there is no majority."""
    values = list(versions.values())
    common = max(set(values), key=values.count)
    return sorted(rank for rank, v in versions.items() if v != common) if values.count(common) > len(values) / 2 else []


def stale(job: Job) -> Iterator[Finding]:
    """Weights that lag by more than the run allows."""
    if job.bound is None:
        return
    beyond: dict[str, list[tuple[Member, int]]] = {COMPUTE: [], UPDATE: []}
    for member in job.members.values():
        worst = max((lag for lag in member.pool.lags if lag > job.bound), default=None)
        if worst is not None:
            beyond[member.role].append((member, worst))
    applied = bool(beyond[UPDATE])
    found = beyond[UPDATE] or beyond[COMPUTE]
    if not found:
        return
    worst = max(lag for _, lag in found)
    ranks = sorted(m.rank for m, _ in beyond[COMPUTE])
    everybody = len(ranks) == len(job.pool(COMPUTE))
    steps = sum(lag.count for m, _ in found for value, lag in m.pool.lags.items() if value > job.bound)
    what = "were applied" if applied else "were computed"
    yield Finding(
        cause="pool_staleness", severity="error" if applied else "warning", confidence=0.85,
        summary=f"Gradients of weights up to {worst} steps old {what} in {steps:,} step{'s' if steps > 1 else ''}; "
                f"{_allowed(job)}." + (f" They are those of {job.name(ranks)}." if ranks and not everybody else ""),
        where=Where(ranks=[] if everybody else ranks, hosts=[] if everybody else job.hosts(ranks), group=GROUP,
                    step=min(m.pool.lags[lag].step for m, lag in found)),
        evidence=[Evidence(path=m.log.path, line=m.pool.lags[lag].line, rank=m.rank,
                           text=f"step {m.pool.lags[lag].step}: staleness {lag}, allowed {job.bound}")
                  for m, lag in found[:MOST_EVIDENCE]],
        numbers={"worst": worst, "allowed": job.bound, "steps": steps},
    )


def _allowed(job: Job) -> str:
    return f"mode {job.mode} allows none" if job.mode in ("sync", "stream") else f"the run allows {job.bound}"


def histogram(job: Job) -> dict[int, int]:
    """Steps by staleness: what the run summed up itself, else from the steps of the compute ranks. Ranks that say the
    same count once."""
    found: dict[int, int] = {}
    for member in job.members.values():
        source = member.pool.histogram or ({value: lag.count for value, lag in member.pool.lags.items()}
                                           if member.role == COMPUTE else {})
        for value, count in source.items():
            found[value] = max(found.get(value, 0), count)
    return dict(sorted(found.items()))


def pairs_text(seen: Sequence[Seen]) -> str:
    """"gradients from rank 1 to rank 2", joined."""
    words = [f"{NOUN.get(s.trouble.direction or '', 'messages')} from rank {s.sender} to rank {s.receiver.rank}"
             for s in seen]
    distinct = list(dict.fromkeys(words))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more links" if len(distinct) > 4 else "")


def _where(job: Job, ranks: list[int], first: Seen) -> Where:
    return Where(ranks=ranks, hosts=job.hosts(ranks), group=GROUP, step=first.trouble.step,
                 time=stamp(first.trouble.time))


def _proof(seen: Sequence[Seen]) -> list[Evidence]:
    found = []
    for item in seen[:MOST_EVIDENCE]:
        record = item.trouble.first
        known = ", ".join(f"{key} {record[key]}" for key in ("direction", "bucket", "attempt", "version", "expected",
                                                             "action") if isinstance(record.get(key), (int, str)))
        more = f" ({item.trouble.count} in all)" if item.trouble.count > 1 else ""
        found.append(Evidence(path=item.receiver.log.path, line=item.trouble.line, rank=item.receiver.rank,
                              text=f"step {record.get('step')}: {item.trouble.name} of rank {item.sender}, "
                                   f"{known}{more}"[:400], time=stamp(item.trouble.time)))
    return found


def _rows(seen: Sequence[Seen]) -> list[dict[str, object]]:
    return [{"from": s.sender, "to": s.receiver.rank, "direction": s.trouble.direction or "", "count": s.trouble.count,
             "first_step": s.trouble.step, "last_step": s.trouble.last.get("step")} for s in seen[:64]]


def _counter(member: Member) -> Evidence:
    return Evidence(path=member.log.path, line=member.pool.last_line or None, rank=member.rank,
                    text=f"rank {member.rank}: {member.pool.totals.get('checksum_errors', 0):.0f} checksum errors in "
                         f"{member.pool.records} steps")


def _version_evidence(member: Member, version: float) -> Evidence:
    return Evidence(path=member.log.path, line=member.pool.last_line or None, rank=member.rank,
                    text=f"update rank {member.rank}: version {version:g}, last {member.pool.version}")


def _refused(job: Job, word: str) -> bool:
    """Whether a rank ended because it refused a message for this reason."""
    for member in job.members.values():
        for event in member.log.events:
            message = event.fields.get("message")
            if event.name == "exception" and isinstance(message, str) and "refused" in message and word in message:
                return True
    return False


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
