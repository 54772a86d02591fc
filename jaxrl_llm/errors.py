"""Errors that a user can act on, and the exit codes of the command line."""

import contextlib
from collections.abc import Iterator

EXIT_USER_ERROR = 2
EXIT_RUN_STOPPED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: not a failure, the same command goes on from the checkpoint


class UserError(ValueError):
    """Bad input: one paragraph naming the option or file, its value, what is allowed and what to do.

    The command line prints the message alone and exits with code 2; in a notebook it is an ordinary exception.
    """


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    """Around the reading of a file or folder of the user's; ``what`` names it, with its path.

    Raises:
      UserError: the system refuses: no right to it, a name that is too long, a disk that fails.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} can't be read: {error.strerror or error}. Look at the rights to it and to its folder, or give "
            "another."
        ) from error


class Preempted(Exception):
    """The run was asked to end (SIGTERM) and has saved a checkpoint from which the same command resumes, or has learned
    nothing yet.

    The command line exits with code 75, so that a scheduler can tell "start me again" from success and failure.
    """


class RunStopped(RuntimeError):
    """A run that must not go on: a check failed while it ran. The last checkpoint is good.

    The command line prints the message alone and exits with code 3.
    """


class Interrupted(Exception):
    """Work on another thread was told to end, because the run does."""
