"""The errors a user can meet, named by who has to act. Each becomes one clear line and an exit status."""

from __future__ import annotations


class PdtrainError(Exception):
    """Base of every error that is a message to the user; anything else that escapes is a bug of ours."""

    exit_status = 2


class UsageError(PdtrainError):
    """Wrong arguments, an impossible configuration, a path that does not exist."""


class ArtefactError(PdtrainError):
    """An input that cannot be read as what it claims to be. Ends at the reading stage as `inputs[].problem`."""


class MissingExtra(PdtrainError):
    """A command needs an optional dependency that is not installed."""

    def __init__(self, command: str, extra: str, module: str) -> None:
        super().__init__(
            f"`{command}` needs {module}, which is not installed; install it with: pip install 'pdtrain[{extra}]'"
        )
