"""The environment variables this package reads, all of them inherited by the workers."""

from __future__ import annotations

import enum
import os

from .errors import ConfigurationError

MODE = "SPECULATORS_VLLM_COMPAT"
FORWARD = "SPECULATORS_VLLM_COMPAT_FORWARD"
SKIP = "SPECULATORS_VLLM_COMPAT_SKIP"
# Set by this package, not by users: the driver is patched, so its workers must be.
DRIVER = "_SPECULATORS_VLLM_COMPAT_DRIVER"


class Mode(enum.Enum):
    """What ``SPECULATORS_VLLM_COMPAT`` asks for."""

    ON = "on"
    WARN = "warn"
    OFF = "off"


class Forward(enum.Enum):
    """What ``SPECULATORS_VLLM_COMPAT_FORWARD`` asks for."""

    OBSERVED = "observed"
    REPLACED = "replaced"


def mode() -> Mode:
    """How strict to be: "on" (the default), "warn" or "off"."""
    return Mode(_choice(MODE, Mode.ON.value, [m.value for m in Mode]))


def forward_mode() -> Forward:
    """Whose forward runs: the model's, "observed" (the default), or speculators', "replaced"."""
    return Forward(_choice(FORWARD, Forward.OBSERVED.value, [f.value for f in Forward]))


def skipped() -> frozenset[str]:
    """Ids of patches to leave out, comma-separated: to find out what a patch does."""
    return frozenset(name.strip() for name in os.environ.get(SKIP, "").split(",") if name.strip())


def _choice(variable: str, default: str, choices: list[str]) -> str:
    value = os.environ.get(variable, "").strip().lower() or default
    if value not in choices:
        raise ConfigurationError(
            f"{variable} is {value!r}; expected one of {', '.join(choices)}.",
            "Set one, or unset it.",
        )
    return value
