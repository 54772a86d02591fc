"""Errors that a user can act on."""


class UserError(ValueError):
    """Bad input: one paragraph naming the option or file, its value, what is allowed and what to do.

    The command line prints the message alone and exits with code 2; in a notebook it is an ordinary exception.
    """


class RunStopped(RuntimeError):
    """A run that must not go on: a check failed while it ran. The last checkpoint is good.

    The command line prints the message alone and exits with code 3.
    """
