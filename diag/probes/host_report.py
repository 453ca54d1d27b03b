"""`pdtrain diag env` as one answer: of the live machine, of all hosts under torchrun, or of saved outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from diag.artefacts import Artefacts, Progress, Unreadable
from diag.artefacts.host_facts import HostFactsFile
from diag.artefacts.log_facts import Log
from diag.correlate import correlate
from diag.detectors import detectors
from diag.diagnose import build_report, detect, read
from diag.discover import discover
from diag.errors import UsageError
from diag.probes.host_facts import HostFacts, encode
from diag.probes.host_gather import gather
from diag.probes.launched import job
from diag.probes.xid import action_of
from diag.schema import Finding, Input, Report
from diag.whole_file import write_whole

#: What lines of a log can say of the machine they were written on. The rest is about a run, and postmortem's to say.
OF_THE_MACHINE = frozenset({
    "gpu_ecc", "gpu_fell_off_bus", "gpu_hw_fault", "nvlink_error", "fabric_manager", "driver_mismatch", "ib_link_error",
    "ib_hca_failure", "ib_gdr_acs", "p2p_acs_iommu", "host_oom", "disk_full", "stale_file_handle", "cuda_kernel_fault",
    "nccl_net_plugin", "nccl_version_mismatch", "shm_too_small", "too_many_open_files", "node_failure", "wrong_nic",
    "segfault", "no_kernel_image", "input_unreadable", "hang_silent",
})


#: How the lines of a kernel log begin: dmesg (raw, -T, -x, --time-format iso), journalctl -k, /dev/kmsg, pstore.
_KERNEL = re.compile(
    rb"^(?:<\d+>)?\[ *\+?\d+\.\d{6}\]|^NVRM: Xid |^\[\w{3} \w{3} [ \d]\d [\d:]{8} \d{4}\] |^kern +:\w+ *:|\bkernel: "
    rb"|^\d,\d+,\d+,[-c];|^\d{4}-\d\d-\d\dT[\d:,.+]+ (?:NVRM|nvidia|\w+\[\d+\])", re.M)


def live(checkpoint: str | None = None, *, save: str | None = None, ranks: int | None = None,
         force: bool = False) -> Report | None:
    """The report of this machine, or of all hosts when this process is a rank of a job; None on ranks but 0.

    `save` is the file to write the facts of this host to. Raises `UsageError` when it cannot be written.
    """
    if save is not None and Path(save).exists() and not force:
        raise UsageError(f"{save}: exists; choose another name, or overwrite it with --force")
    place = job()
    facts = gather(checkpoint)
    if ranks is not None:
        facts.local_ranks = ranks
    hosts = [facts]
    if place is not None and place[1] > 1:
        from diag.probes.host_job import all_hosts

        hosts = all_hosts(facts, place)
    if save is not None:
        _save(save, facts)
    if not hosts:
        return None
    return report_of(hosts)


def report_of(hosts: list[HostFacts]) -> Report:
    """The report of hosts whose facts were gathered just now."""
    items = [HostFactsFile(path=f"{facts.host or 'host'}:live", format="live", facts=facts, ranks=list(facts.ranks),
                           live=True) for facts in hosts]
    artefacts = Artefacts(items)
    chosen = [d for d in detectors("env") if HostFactsFile in d.needs]
    findings, not_checked, ran = detect(artefacts, chosen)
    inputs = [Input(path=item.path, format="live host", ranks=item.ranks) for item in items]
    report = build_report(correlate(findings, artefacts), inputs=inputs, not_checked=not_checked, checked=ran > 0)
    return _worded(report, len(hosts))


def saved(paths: Iterable[str | Path], *, signatures: Path | None = None, progress: Progress | None = None) -> Report:
    """The report of saved outputs. Raises `UsageError` for a path that does not exist or when nothing was found."""
    from diag.artefacts import ReadOptions
    from diag.diagnose import _damage, _input

    names = [str(path) for path in paths]
    chosen = [d for d in detectors(("env", "logs")) if d.topic == "env" or Log in d.needs]
    sources = discover(names, options=ReadOptions(signatures=signatures))
    items, notes = read(sources, chosen, progress=progress)
    if not items:
        raise UsageError(f"{', '.join(names[:5])}: {notes[0] if notes else 'empty; nothing to read'}")
    artefacts = Artefacts(items)
    texts = [item for item in items if isinstance(item, Log)]
    kernels = {source.path for source in sources if not isinstance(source, Unreadable)
               and _KERNEL.search(source.head)}
    other = [item.path for item in texts if item.path not in kernels]
    present = [d for d in chosen if all(artefacts.of(kind) for kind in d.needs)]
    findings, not_checked, ran = detect(artefacts, present)
    findings = [_with_action(f) for f in findings if "standing" in f.numbers or f.cause in OF_THE_MACHINE]
    if other:
        named = f"{', '.join(other[:3])}{' and more' if len(other) > 3 else ''}"
        notes = [*notes, f"{named}: no output that is known here; only searched for lines that speak of hardware"]
        if len(other) == len([item for item in items if not isinstance(item, Unreadable)]):
            ran, not_checked = 0, [f"{len(other)} text{'s' if len(other) > 1 else ''} of no known kind"]
    findings = correlate(findings, artefacts) + list(_damage(items))
    report = build_report(findings, inputs=[_input(item) for item in items], not_checked=[*not_checked, *notes],
                          checked=ran > 0)
    return _worded(report, sum(not isinstance(item, Unreadable) for item in items), saved_=True)


def _with_action(finding: Finding) -> Finding:
    """The catalogue's action for each Xid among the evidence, before the playbook's steps."""
    actions = list(dict.fromkeys(a for e in finding.evidence if (a := action_of(e.text)) is not None))
    if actions and not finding.fix:
        from diag.playbooks import fill, for_cause

        page = for_cause(finding.cause)
        finding.fix = actions + [fill(step, finding.where) for step in (page.fix if page else [])]
    return finding


def _worded(report: Report, count: int, *, saved_: bool = False) -> Report:
    """A headline that speaks of machines, not of a run."""
    if report.verdict == "healthy" and not any(f.severity != "info" for f in report.findings):
        if saved_:
            report.headline = f"Nothing wrong was found in {count} saved output{'s' if count != 1 else ''}."
        else:
            report.headline = "Nothing wrong was found on this machine." if count == 1 else \
                f"Nothing wrong was found on {count} hosts, and they are alike where it matters."
    return report


def _save(target: str, facts: HostFacts) -> None:
    name = target.replace("%h", facts.host).replace("%r", str(facts.ranks[0] if facts.ranks else 0))
    try:
        write_whole(Path(name), encode(facts))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from None
