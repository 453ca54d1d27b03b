"""Is a checkpoint whole and undamaged? Every check with its outcome, offline, without torch.

    outcomes = verify(open_checkpoint(path), Options(deep=True))

The order of `CHECKS` is the order of belief: what an earlier check says explains what a later one stumbles over.
"""

from __future__ import annotations

from diag.checkpoints.canonical import Checkpoint, Problem
from diag.checkpoints.verify import archives, experts, identity, structure, training, values
from diag.checkpoints.verify.archives import Progress
from diag.checkpoints.verify.digests import collect, digests
from diag.checkpoints.verify.outcome import Check, NotApplicable, Options, Outcome, perform

__all__ = ["CHECKS", "Options", "Outcome", "verify"]

CHECKS = (
    Check("commit mark", structure.commit),
    Check("metadata", structure.reported),
    Check("nothing to execute", structure.hostile),
    Check("paths stay inside", structure.reported),
    Check("files complete", structure.files),
    Check("no leftovers", structure.leftovers),
    Check("no stale shards", structure.stale),
    Check("index", structure.index),
    Check("headers", structure.headers),
    Check("names are unique", structure.reported),
    Check("element types", structure.reported),
    Check("every chunk has bytes", structure.reported),
    Check("byte ranges", structure.places),
    Check("archives", archives.structure),
    Check("sizes", structure.sizes),
    Check("chunks tile", structure.tiling),
    Check("ranks agree", structure.ranks),
    Check("files in place", identity.placed),
    Check("digests", digests, reads=True),
    Check("CRC32", archives.crc, reads=True),
    Check("experts complete", experts.experts),
    Check("layers agree", values.layers),
    Check("experts differ", experts.clones, reads=True),
    Check("copies equal", training.copies, reads=True),
    Check("optimizer complete", training.optimizer),
    Check("masters", identity.masters, reads=True),
    Check("steps equal", training.steps, reads=True),
    Check("moments", training.moments, reads=True),
    Check("rng", training.rng),
    Check("loader state", training.loader),
    Check("not constant", values.buffers, reads=True),
    Check("finite", values.finite, reads=True),
    Check("holds tensors", structure.holds),
)


def verify(checkpoint: Checkpoint, options: Options | None = None, progress: Progress | None = None) -> list[Outcome]:
    """Run every check. Damage is an outcome; nothing is raised for what lies in the files."""
    options = options or Options()
    collect(checkpoint)
    found: list[Outcome] = []
    for check in CHECKS:
        if check.reads and not options.bytes:
            continue
        if check.name == "CRC32":
            check = Check(check.name, lambda c, o, p: archives.crc(c, o, p, progress))
        outcome = perform(check, checkpoint, options)
        checkpoint.problems += [p for p in outcome.problems if p not in checkpoint.problems]
        found.append(outcome)
    if options.against is not None:
        from diag.checkpoints.verify.against import against

        found.append(perform(Check("model config", against), checkpoint, options))
    names = {check.name for check in CHECKS}
    left = [p for p in checkpoint.problems if p.check not in names and p.check != "model config"]
    if left:
        found.append(Outcome("other", "FAIL", "", left))
    return found


def worst_first(outcomes: list[Outcome]) -> list[Problem]:
    """All problems, in the order in which they are to be believed: errors before warnings, then the order of checks."""
    listed = [p for outcome in outcomes for p in outcome.problems]
    return sorted(listed, key=lambda p: p.severity == "warning")


__all__ += ["Checkpoint", "NotApplicable", "worst_first"]
