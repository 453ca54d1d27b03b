"""Who printed a console line and when: the prefixes that launchers, schedulers and libraries put before it.

Seen in the wild (public documentation of each): torchrun `--tee` "[default1]:" (local rank), torch's own "[rank3]:"
(global), Slurm `srun -l` "12: ", pdsh "node7: ", Open MPI "[1,3]<stderr>:", Ray "(Actor pid=81, ip=10.0.0.5)", NCCL
"host:pid:tid [dev]", glog "E0810 03:04:10.85 pid file:line]" with month and day glued, and time stamps of every shape.
Ranks write to one terminal without locking, so markers are searched anywhere before the words that matter.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass

from diag.artefacts.log_facts import Speaker

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")

_RANK_MARK = re.compile(r"\[rank ?(\d{1,6})\]:?")
_TEE = re.compile(r"\[([A-Za-z_]\w*?)(\d{1,4})\]:")
#: Several marks in a row at the front of a line all belong to its writer ("[default1]:[rank9]: ").
_MARKS = re.compile(r"(?:\s?\[[^\]\s]{1,24}\]:? ?)+")
_MPI = re.compile(r"\[\d+,(\d{1,6})\]<std(?:out|err)>:")
_SRUN = re.compile(r"^\s{0,5}(\d{1,6}): ")
_PDSH = re.compile(r"^([A-Za-z][\w.-]*\d[\w.-]*|\d{1,3}(?:\.\d{1,3}){3}): ")
_RAY = re.compile(r"\(([\w<>.:]+) pid=(\d+)(?:, ip=([\w.:-]+))?\)")
_NCCL = re.compile(r"(?:^|[\s\]:])([A-Za-z0-9][\w.-]*):(\d+):(\d+) (?:\[(\d+)\]|NCCL )")
_BRACKET_HOST = re.compile(r"^\[([A-Za-z][\w.-]*?[-_.]?\d[\w.-]*)\](?!:\[)")
#: words before a number in brackets that do not name hosts
_NOT_HOSTS = re.compile(r"^(?:rank|default|worker|trainer|titan|step|epoch|iter|iteration|batch|layer|gpu|cuda|dp|pp|tp"
                        r"|py|v|attempt|sha|torch|llama|h\d|a\d|nccl|ib|mlx|info|warn|err|debug|node)\W?\d*$", re.I)
_SYSLOG_HOST = re.compile(r"(?:^|[\s|>)])(?:[A-Z][a-z]{2} {1,2}\d{1,2} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\S+) ([\w.-]+) "
                          r"(?:kernel|systemd|slurmd|slurmstepd|nvidia\S*|dmesg|python\d?)(?:\[\d+\])?: ")
_WORD_RANK = re.compile(r"\[(?:Rank|RANK|GLOBAL_RANK)[ :]?(\d{1,6})\]|\bRank (\d{1,6})\]|\brank=(\d{1,6})\]"
                        r"|(?:(?<=^)|(?<=[\]:|>-] )|(?<=[\[(]))(?:Rank|RANK|rank|GLOBAL_RANK)[ :=#]{1,2}(\d{1,6})\b"
                        r"(?! and)")
_LOCAL = re.compile(r"\b(?:local[_ -]?rank|LOCAL_RANK)[\"']?[ :=]+(\d{1,3})\b")
_PID = re.compile(r"\b(?:pid|PID|proc)[ :=]+(\d{2,8})\b")

_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_ISO = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\s?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"(?:^|[\[\]:\s])[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_US = re.compile(r"\[(\d\d)/(\d\d)/(\d\d(?:\d\d)?),? (\d\d):(\d\d):(\d\d)")
_SYSLOG = re.compile(r"(?:^|[\s\[])([A-Z][a-z]{2}) {1,2}(\d{1,2})(?: (\d{4}))? (\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?"
                     r"(?: (\d{4}))?")
_RAY_TIME = re.compile(r"(?:^|\s)(?:INFO|WARNING|ERROR|DEBUG) (\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)")
_CLOCK = re.compile(r"\d\d:\d\d")
#: Stamps stand at the front; a date further on is part of a message.
_TIME_WINDOW = 160
#: After the kernel's own stamp, seconds since it was started, a date stands at once or is one of a message: the driver
#: and the kernel say when they were built, and that is no time of anything.
_UPTIME = re.compile(r"(?:<\d+>)?\[ *\d+\.\d{6}\]")
_UPTIME_WINDOW = 30
_BUILT = re.compile(r"NVRM: loading |Linux version \d")
#: No host name is longer than 253 bytes.
_HOST_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Style:
    """How the lines of one file are marked, judged over its head: what a single line cannot tell."""

    srun: bool = False
    pdsh: bool = False
    year: int = 1972


def style_of(head: bytes) -> Style:
    """The style of a file from its first 64 KiB. A leading "3: " is a task number only when most lines have one."""
    text = head[:65_536].decode("utf-8", "replace")
    lines = [line for line in map(clean, text.splitlines()[:400]) if line]
    if not lines:
        return Style()
    srun = sum(bool(_SRUN.match(line)) for line in lines)
    pdsh = [m[1] for line in lines if (m := _PDSH.match(line, 0, _HOST_WINDOW))]
    year = next((int(m[1]) for line in lines if (m := _ISO.search(line[:_TIME_WINDOW])) and m[1] > "1990"), 1972)
    return Style(srun=srun * 2 > len(lines), pdsh=len(pdsh) * 2 > len(lines) and len(set(pdsh)) < 4096, year=year)


def clean(text: str) -> str:
    """`text` without ANSI escape sequences and trailing blanks."""
    return ANSI.sub("", text).rstrip() if "\x1b" in text else text.rstrip()


def speaker_of(text: str, at: int = 0, style: Style = Style()) -> Speaker:  # noqa: B008 - frozen
    """Who printed the words at `at` in the (physical) line `text`, and when.

    Of several rank markers in one line the last one before the words counts: two ranks shared the line.
    """
    rank = local = pid = device = None
    host, mark = None, ""
    marks = _MARKS.match(text)
    front = max(at, marks.end() - 1 if marks is not None else 0)
    before = text[: front + 24]
    for found in _RANK_MARK.finditer(before):
        if found.start() > front:
            break
        rank, mark = int(found[1]), found[0].rstrip(":")
    if rank is None:
        for found in _TEE.finditer(before):
            if found.start() > front or found[1].lower() in ("cuda", "gpu", "step", "node", "dp", "tp", "pp"):
                continue
            if found[1] == "rank":
                rank = int(found[2])
            else:
                local = int(found[2])
            mark = found[0]
    if rank is None and (found_mpi := _MPI.match(text)):
        rank, mark = int(found_mpi[1]), found_mpi[0]
    if rank is None and style.srun and (found_srun := _SRUN.match(text)):
        rank, mark = int(found_srun[1]), found_srun[0].strip()
    if style.pdsh and (found_pdsh := _PDSH.match(text, 0, _HOST_WINDOW)):
        host, mark = found_pdsh[1], mark or found_pdsh[0].strip()
    if (found_ray := _RAY.search(text[: front + 100])) is not None:
        pid, host, mark = int(found_ray[2]), found_ray[3] or host, mark or found_ray[0]
    nccl = None
    for nccl in _NCCL.finditer(text[: at + 200]):
        if nccl.start() > at:
            break
    if nccl is not None:
        host, pid = nccl[1], int(nccl[2])
        device = int(nccl[4]) if nccl[4] else None
        mark = mark or f"{nccl[1]}:{nccl[2]}"
    if host is None and (found_host := _BRACKET_HOST.match(text, 0, _HOST_WINDOW)) and \
            not _NOT_HOSTS.match(found_host[1]):
        host, mark = found_host[1], mark or found_host[0]
    if host is None and (found_host := _SYSLOG_HOST.search(text[:_TIME_WINDOW])):
        host = found_host[1]
    if host is None and (found_host := re.match(r"^\[(node[-_]?\d[\w.-]*)\]", text)):
        host, mark = found_host[1], mark or found_host[0]
    if rank is None:
        rank = _word_rank(text, at)
    if local is None and (found_local := _LOCAL.search(text)):
        local = int(found_local[1])
    if pid is None and (found_pid := _PID.search(text)):
        pid = int(found_pid[1])
    return Speaker(rank=rank, local_rank=local, host=host, pid=pid, device=device,
                   time=time_of(text, style.year), mark=mark)


#: Any mark that `front_speaker` knows; most progress lines of one writer look alike, so this test is cheap.
_FRONT = re.compile(r"\s{0,8}(?:\[rank ?(\d{1,6})\]:?|\[([A-Za-z_]\w*?)(\d{1,4})\]:|\[[Rr]ank (\d{1,6})\])")


def front_speaker(text: str, style: Style = Style()) -> Speaker:  # noqa: B008 - frozen
    """Like `speaker_of` for a line whose writer, if marked at all, is marked at its front: progress lines."""
    found = _FRONT.match(text)
    if found is None:
        if "(" in text[:3] or style.srun or style.pdsh or "rank" in text[:60] or "Rank" in text[:60]:
            return speaker_of(text[:200], 0, style)
        return Speaker(time=time_of(text, style.year))
    rank = found[1] or found[4] or (found[3] if found[2] == "rank" else None)
    local = found[3] if rank is None else None
    return Speaker(rank=int(rank) if rank is not None else None, local_rank=int(local) if local is not None else None,
                   time=time_of(text, style.year), mark=found[0].strip())


def _word_rank(text: str, at: int) -> int | None:
    """A rank named in words at the front of a message ("[Rank 5] Watchdog ...", "rank 8: checkpoint begin")."""
    best = None
    for found in _WORD_RANK.finditer(text[: at + 120]):
        if found.start() > at + 24 and (best is not None or found.start() > 120):
            break
        best = int(next(group for group in found.groups() if group))
    return best


def time_of(text: str, year: int = 1972) -> float | None:
    """The time stamp at the front of `text` in seconds since 1970, in the log's own clock; None without a date.

    Stamps without a year take `year`; times of one file compare, times of two hosts compare up to their zones.
    """
    front = text[:_TIME_WINDOW]
    if not _CLOCK.search(front):
        return None
    if m := _UPTIME.match(front):
        front = front[m.end():m.end() + _UPTIME_WINDOW]
    if m := _BUILT.search(front):
        front = front[:m.start()]
    if m := _ISO.search(front):
        return _seconds(m[1], m[2], m[3], m[4], m[5], m[6], m[7])
    if m := _GLOG.search(front):
        return _seconds(str(year), m[1], m[2], m[3], m[4], m[5], m[6])
    if m := _US.search(front):
        full = m[3] if len(m[3]) == 4 else f"20{m[3]}"
        return _seconds(full, m[1], m[2], m[4], m[5], m[6], None)
    if (m := _SYSLOG.search(front)) and m[1].lower() in _MONTHS:
        return _seconds(m[3] or m[8] or str(year), str(_MONTHS[m[1].lower()]), m[2], m[4], m[5], m[6], m[7])
    if m := _RAY_TIME.search(front):
        return _seconds(str(year), m[1], m[2], m[3], m[4], m[5], None)
    return None


def _seconds(year: str, month: str, day: str, hour: str, minute: str, second: str, fraction: str | None,
             ) -> float | None:
    try:
        parts = (int(year), int(month), int(day), int(hour), int(minute), int(second))
        if not (1 <= parts[1] <= 12 and 1 <= parts[2] <= 31 and parts[3] < 24 and parts[4] < 60 and parts[5] <= 60):
            return None
        whole = calendar.timegm((*parts, 0, 0, 0))
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


def show_time(seconds: float) -> str:
    """Seconds as "2026-08-10 03:04:10"; without the year when it was not in the log."""
    import time

    moment = time.gmtime(seconds)
    return time.strftime("%m-%d %H:%M:%S" if moment.tm_year == 1972 else "%Y-%m-%d %H:%M:%S", moment)
