"""Sentences and next steps for what the loss shows, in the words of the program that wrote the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diag.loss.batches import command_of

if TYPE_CHECKING:
    from diag.loss.blame import Blame
    from diag.loss.events import Event
    from diag.series import Column, Run


def sentence_of(cause: str, run: Run, column: Column, event: Event, why: Blame, count: int) -> str:
    """One sentence: what, when, how it went on, what moved first."""
    peak = float(column.values[event.peak])
    at = f" at step {int(column.steps[event.onset]):,}" if run.steps_known else ""
    name = "loss" if column.name == "loss" else column.key
    jump = f"The {name} {'rose' if event.kind == 'divergence' else 'jumped'} from {event.level:.3g} to {peak:.3g}{at}"
    if event.kind == "divergence":
        ending = f" and stays up ({float(column.values[-1]):.3g})"
    elif event.kind == "open":
        ending = ", as it has done and come down before" if event.again else \
            " and is coming down" if event.points > 3 else ", shortly before the end of the record"
    elif event.kind == "slow":
        ending = f" and needed {event.points} logged points to come back"
    else:
        ending = " and came back"
    if cause == "loss_resume_jump":
        ending = f", where the run was resumed{'' if event.kind == 'divergence' else ending}"
    lead = ""
    if why.lr_jump:
        lead = f"; the learning rate had risen {why.lr_jump[1]:.0f} times" + \
            (f" at step {why.lr_jump[0]:,}" if run.steps_known else "")
    elif why.changed:
        lead = f"; the {' and '.join(why.changed).replace('_', ' ')} changed there"
    elif why.norm_led:
        lead = f"; the gradient norm rose first (step {why.norm_step:,})" if why.norm_step is not None and \
            run.steps_known else "; the gradient norm rose first"
    elif why.norm_led is False and cause == "loss_spike":
        lead = "; the gradient norm did not rise before it: suspect the data"
    if why.module:
        lead += f", in {why.module} first"
    more = f"; {count - 1} more like it" if count > 1 else ""
    return jump + ending + lead + more


def fix_of(cause: str, run: Run, step: int, why: Blame) -> list[str]:
    """First things to do, with the options of the program at hand; empty leaves it to the playbook."""
    if cause == "loss_resume_jump":
        return []
    before = f"before step {step:,}" if run.steps_known else "before it began"
    lower, rewind = _options(run, step, why)
    steps = []
    if why.lr_jump:
        steps = [f"Mend the schedule: the learning rate rose {why.lr_jump[1]:.0f} times from one record to the next",
                 f"Rewind to the last checkpoint {before}: {rewind}"]
    elif why.norm_led or cause in ("loss_divergence", "loss_nan"):
        steps = [f"Rewind to the last checkpoint {before}: {rewind}",
                 f"Lower the peak learning rate or clip harder: {lower}"]
    elif cause == "loss_spike":
        steps = [_batches(why, step, run), f"If it happens again: {lower}"]
    return [s for s in steps if s]


def _batches(why: Blame, step: int, run: Run) -> str:
    if why.documents:
        return f"Look at documents {', '.join(map(str, why.documents[:8]))}: the loss jumped on them"
    if why.samples is not None:
        low, high = why.samples
        named = f": {command}" if (command := command_of(run, step)) else ""
        return f"Look at samples {low:,} to {high:,}, on which the loss jumped; skip them on a rewind{named}"
    return f"Look at the batch of step {step:,}: repeated or broken text, wrong labels" if run.steps_known else ""


def _options(run: Run, step: int, why: Blame) -> tuple[str, str]:
    lr = f"{0.5 * why.lr:.3g}" if why.lr else "half of it"
    if run.style == "pdtrain":
        return (f"--set optimizer.lr={lr}" if why.lr else "--set optimizer.lr=<half of it>",
                f"pdtrain train --resume <run>/checkpoints/step_<N> with N below {step}")
    if run.style == "megatron":
        return f"--lr {lr} --clip-grad 0.5", f"--load <checkpoints> --ckpt-step <N below {step}>"
    if run.style == "hf":
        return f"--learning_rate {lr} --max_grad_norm 0.5", f"--resume_from_checkpoint checkpoint-<N below {step}>"
    return f"learning rate {lr}, gradient clipping 0.5", f"resume from a step below {step}"


def well_of(run: Run, column: Column) -> str:
    """One sentence about a run whose loss shows nothing."""
    first, last = float(column.values[0]), float(column.values[-1])
    span = f"steps {int(column.steps[0]):,} to {int(column.steps[-1]):,}" if run.steps_known else "the whole record"
    if len(column) > 1 and (column.values == column.values[0]).all():
        return f"{run.label}: {column.key} is {first:.4g} at each of {len(column):,} points: is it really logged?"
    few = " (few to judge by)" if len(column) < 8 else ""
    return (f"{run.label}: {column.key} {first:.4g} to {last:.4g} over {span}, {len(column):,} points{few}: nothing "
            "unusual.")
