"""The root command. Subcommands load lazily: `pdtrain --help` imports neither torch, rich nor numpy."""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

import click

from diag.errors import PdtrainError
from diag.lazy import LazyGroup
from pdtrain import __version__

TABLE = {
    "train": ("pdtrain.commands.train:train", "Train a mixture-of-experts model with separated modules."),
    "plan": ("pdtrain.commands.plan:plan", "Whether it will fit and how fast it can be, before a device is rented."),
    "sweep": ("pdtrain.commands.sweep:sweep", "Try layouts for real in short runs, and fit the plan to them."),
    "demo": ("pdtrain.commands.demo:demo", "Train a small model on two processes here, then diagnose the run."),
    "diag": ("diag.commands:diag", "What broke first, where, and what to do."),
    "drill": ("pdtrain.commands.drill:drill", "Break a copy of a checkpoint on purpose."),
    "playbook": ("diag.commands.playbook:playbook", "Symptom, locate, fix, verify: one page per failure."),
}


@click.group(cls=LazyGroup, table=TABLE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pdtrain")
def cli() -> None:
    """A mixture-of-experts trainer with separated workloads, and a doctor for any distributed PyTorch run."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line; the one place that turns errors into one line and an exit status."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller: print into nothing
        sys.stdout, sys.stderr = (stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
                                  for stream in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal does not know costs that character
    try:
        status = cli.main(args=argv, prog_name="pdtrain", standalone_mode=False)
    except click.exceptions.Abort:
        status = _complain("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        status = 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        usage = f"{context.command_path}: " if context else ""
        status = _complain(f"{usage}{' '.join(error.format_message().split())}", 2)
    except PdtrainError as error:
        status = _complain(str(error), error.exit_status)
    except BrokenPipeError:  # `pdtrain … | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            status = _complain(_crash_report(error), 70)
        else:  # nobody's bug; what standard output still holds would fail once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = _complain(f"{error.filename or 'standard output'}: cannot be written: {error.strerror}", 2)
    except KeyboardInterrupt:
        status = _complain("interrupted", 130)
    except Exception as error:  # a bug of ours: the user gets one line, we get the traceback
        if "RANK" not in os.environ or os.environ.get("PDTRAIN_STRICT"):
            status = _complain(_crash_report(error), 70)
        else:  # a rank's traceback belongs to its own log, where the doctor looks for it
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
    status = status if isinstance(status, int) else 0
    if status and "RANK" in os.environ and argv is None:  # else this process belongs to who called
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> NoReturn:
    """The end of a rank that failed, without that of the interpreter: threads that wait in Gloo for a peer would be
    unwound through C++ and abort the process, whose last word and exit status were then not its own."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _crash_report(error: Exception) -> str:
    """Write the traceback to a file and say where; under PDTRAIN_STRICT (tests) let it out."""
    if os.environ.get("PDTRAIN_STRICT"):
        raise error
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="pdtrain-crash-", suffix=".txt", delete=False) as file:
        file.write(f"pdtrain {__version__}, {' '.join(sys.argv)}\n")
        file.write("".join(traceback.format_exception(error)))
    return f"internal error: {type(error).__name__}: {error}; please report it with {file.name}"


def _complain(message: str, status: int) -> int:
    from diag.report.text import printable  # names of files and of what they hold come from outside

    print("\n".join(printable(line) for line in f"pdtrain: {message}".split("\n")), file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
