"""`pdtrain`, and `python -m pdtrain` as launchers start it: torchrun -m pdtrain diag comm.

Everything is imported inside, so that Ctrl-C while Python is still importing is one word and no traceback.
"""

import sys


def main() -> None:
    """Run the command line; 130 when it was interrupted before it could say anything."""
    try:
        from pdtrain.cli import main
    except KeyboardInterrupt:
        print("pdtrain: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
