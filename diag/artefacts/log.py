"""Console logs, scheduler output, kernel logs: any text. One file is reduced to facts in bounded memory.

Recognised last of all formats: printable text that no other reader claims. Formats of the lines are those of
`log_lines`, `log_progress` and `traceback`; what a line means is in `diag/signatures`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import PurePath

from diag.artefacts import Artefact, Progress, Source, Unreadable
from diag.artefacts.log_facts import Log
from diag.artefacts.log_pool import run
from diag.artefacts.log_scan import Facts
from diag.signatures import Rule, load_catalogue

NAME = "log"
ARTEFACT = Log

#: Text files that lie beside logs and are none.
_OTHER_SUFFIXES = {".py", ".md", ".rst", ".toml", ".yaml", ".yml", ".json", ".csv", ".tsv", ".sh", ".slurm", ".html",
                   ".ipynb", ".cfg", ".ini", ".conf", ".c", ".cpp", ".cu", ".h", ".hpp", ".tex", ".xml", ".lock",
                   ".svg"}
_LOG_SUFFIXES = {".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".dmesg", ".console"}
_LOG_LINE = re.compile(
    rb"\d\d:\d\d:\d\d|\[rank ?\d+\]|\[[a-z]+\d+\]:|NCCL (?:INFO|WARN)|Traceback \(most|NVRM: |slurmstepd"
    rb"|\biteration +\d+/|\bstep[ :=]+\d+|\bloss[ :=']|\bepoch[ :=]+\d|(?:INFO|WARNING|ERROR|DEBUG)[ :\]]|%\|", re.I)

_FILE_RANK = re.compile(r"(?:^|[._-])(?:rank|global_rank|task)[._=-]?(\d{1,6})(?=[._-]|$)", re.I)
_TREE = re.compile(r"(?:^|/)attempt_(\d+)/(\d+)/(?:stdout|stderr)\.log$|(?:^|/)attempt_(\d+)/(\d+)/error\.json$")
_FILE_HOST = re.compile(r"(?:^|[._-])((?:node|host|worker|gpu|compute|dgx|hgx|pod|ip)[-_]?[\w-]*\d)(?=[._]|$)", re.I)


_CONTROL = bytes((*range(7), *range(14, 27), *range(28, 32)))
_ASCII = bytes(range(128))
#: What a crash of the host, or truncation under an open log (copytruncate), leaves between its lines.
_HOLE = re.compile(rb"\0{512,}")


def sniff(head: bytes, name: str) -> float:
    """Printable text with lines. Weak (0.2) unless lines look logged, so that every specific format wins."""
    if bytes(512) in head:
        head = _HOLE.sub(b"\n", head)
    if not head.strip():
        return 0.0
    sample = head[:16_384]
    control = len(sample) - len(sample.translate(None, _CONTROL))
    try:
        sample.decode("utf-8")
        odd = 0
    except UnicodeDecodeError as error:
        odd = 0 if error.start >= len(sample) - 4 else len(sample.translate(None, _ASCII))
    if control > len(sample) // 20 or odd > len(sample) // 4:
        return 0.0
    suffix = PurePath(name.lower()).suffix
    enough = -(-min(len(sample), 8000) // 400)
    logged = sum(1 for _ in islice(_LOG_LINE.finditer(sample), enough)) == enough
    if suffix in _OTHER_SUFFIXES:
        return 0.15 if logged and suffix not in (".py", ".md", ".rst", ".html", ".ipynb", ".sh", ".json") else 0.0
    if sample.lstrip()[:1] in (b"{", b"["):
        return 0.2 if suffix not in _LOG_SUFFIXES else 0.3
    named = suffix in _LOG_SUFFIXES or re.search(r"log|dmesg|slurm|syslog|messages", name, re.I)
    return 0.4 if logged or named else 0.2


def read(source: Source) -> Artefact:
    """The facts of one log."""
    return read_many([source], lambda done, total: None)[0]


def read_many(sources: Sequence[Source], progress: Progress) -> list[Artefact | Unreadable]:
    """The facts of many logs, scanned on all cores; with `options.series` their numbers instead.

    Raises `UsageError` for a bad signature of the user's.
    """
    if sources and sources[0].options.series:
        return [_series(source) for source in sources]
    catalogue = load_catalogue(sources[0].options.signatures if sources else None)
    results = run(sources, catalogue, progress)
    return [log_of(source, pieces, catalogue.by_id) for source, pieces in zip(sources, results, strict=True)]


def _series(source: Source) -> Artefact:
    from diag.artefacts.metric_lines import read_table

    table = read_table(source)
    log = Log(path=source.path, format=NAME, bytes=source.bytes, lines=table.lines, problem=table.problem,
              problem_severity=table.problem_severity, table=table)
    _name(log)
    return log


def log_of(source: Source, pieces: list[Facts], rules: dict[str, Rule]) -> Artefact:
    """The artefact that the facts of a log's pieces make, with the identity that its path tells."""
    facts = _joined(pieces)
    if facts.problem and not facts.lines:
        return Unreadable(path=source.path, format=NAME, bytes=source.bytes, problem=facts.problem)
    log = Log(path=source.path, format=NAME, bytes=source.bytes, lines=facts.lines, problem=facts.problem,
              problem_severity="warning", events=facts.events, tracebacks=facts.tracebacks, progress=facts.progress,
              counts=facts.counts, tail=facts.tail, rare=facts.rare, clock=facts.clock, size=facts.size, rules=rules)
    _name(log)
    if log.name_rank is not None:
        log.ranks = [log.name_rank]
    return log


def _joined(pieces: list[Facts]) -> Facts:
    whole = pieces[0]
    for piece in pieces[1:]:
        piece.shift(whole.lines, whole.size)
        whole.events += piece.events
        whole.tracebacks += piece.tracebacks
        whole.progress += piece.progress
        whole.clock += piece.clock
        for rule, count in piece.counts.items():
            whole.counts[rule] = whole.counts.get(rule, 0) + count
        whole.tail, whole.rare = piece.tail, piece.rare
        whole.lines += piece.lines
        whole.size += piece.size
        whole.problem = whole.problem or piece.problem
    return whole


def _name(log: Log) -> None:
    """Identity that the path tells: torchrun's log tree, a rank or a host in the file's name."""
    path = log.path.replace("\\", "/")
    if tree := _TREE.search(path):
        log.attempt = int(tree[1] or tree[3])
        log.name_local_rank = int(tree[2] or tree[4])
        return
    name = PurePath(path).name
    if found := _FILE_RANK.search(name):
        log.name_rank = int(found[1])
    if found := _FILE_HOST.search(name):
        log.name_host = found[1]
