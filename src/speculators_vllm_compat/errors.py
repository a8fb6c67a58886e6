"""The errors this package raises, all of them subclasses of :class:`CompatError`."""


class CompatError(Exception):
    """Something about the installed pair, or a call, that cannot be made right.

    The message says what was found, what was expected and what to do.

    Args:
        message: What was found and what was expected.
        remedy: What to do, where reports show it on a line of its own.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(f"{message} {remedy}".strip())
        self.message = message
        self.remedy = remedy


class InstallationError(CompatError):
    """What is installed is ambiguous or broken: several vLLM distributions, a bare folder."""


class UnknownFormError(CompatError):
    """A boundary of the installed vLLM or speculators has a form no probe knows."""


class MatrixError(CompatError):
    """compat_matrix.yaml is invalid, or the probes disagree with what it expects."""


class ConfigurationError(CompatError):
    """An environment switch or an argument of this package has a value it does not know."""


class WorkerError(CompatError):
    """A worker process does not, or would not, run with the patches."""


class PatchError(CompatError):
    """A patch could not be applied; everything applied before it was undone."""
