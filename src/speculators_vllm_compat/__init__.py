"""Lets speculators' VllmHiddenStatesGenerator run, and run right, on the vLLM you have.

Import this package before speculators; nothing else is needed. ``SPECULATORS_VLLM_COMPAT=off``
in the environment switches it off, ``=warn`` lowers an unknown form to a warning.
"""

__version__ = "0.1.0"

from .activation import PatchStatus, Status, activate_by_import, apply, patched, revert, status
from .errors import CompatError

__all__ = [
    "CompatError",
    "PatchStatus",
    "Status",
    "__version__",
    "apply",
    "patched",
    "revert",
    "status",
]

activate_by_import()
