"""The environment variables this package reads, all of them inherited by the workers."""

from __future__ import annotations

import enum
import os

from .errors import ConfigurationError

MODE = "SPECULATORS_VLLM_COMPAT"
FORWARD = "SPECULATORS_VLLM_COMPAT_FORWARD"
SKIP = "SPECULATORS_VLLM_COMPAT_SKIP"
RING = "SPECULATORS_VLLM_COMPAT_RING_MB"
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


def ring_bytes() -> int | None:
    """The most shared memory for hidden states, in bytes; None for a share of what is free."""
    text = os.environ.get(RING, "").strip()
    if not text:
        return None
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = -1.0
    if not 0 <= megabytes < float("inf"):
        raise ConfigurationError(
            f"{RING} is {text!r}; expected a number of megabytes, 0 for none. Correct it, or unset "
            "it to use a share of the free memory."
        )
    return int(megabytes * 1e6)


def _choice(variable: str, default: str, choices: list[str]) -> str:
    value = os.environ.get(variable, "").strip().lower() or default
    if value not in choices:
        raise ConfigurationError(
            f"{variable} is {value!r}; expected one of {', '.join(choices)}.",
            "Set one, or unset it.",
        )
    return value
