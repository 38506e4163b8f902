"""The two exceptions that are not our faults: what the user asked wrongly, and what cannot run here."""


class UserError(ValueError):
    """A mistake in the input. One line: the thing, the value, the way out. It ends a command with exit code 2."""


class Unsupported(RuntimeError):
    """An arm that cannot run on this machine (missing library, wrong device). Becomes record status ``unsupported``."""
