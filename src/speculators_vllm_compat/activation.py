"""Switching the patches on and off: by import, by hand, in the driver and in workers.

Switching on imports nothing. It watches for speculators to be imported; only then are the
probes run, before any of speculators' code, and each patch is applied as soon as the module it
is about exists. If one fails, all are undone and that import fails.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CompatError, ConfigurationError, PatchError
from .imports import ImportHooks
from .switches import DRIVER, Mode, mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Set

    from .patching import Ledger, Patch
    from .plan import Plan

logger = logging.getLogger("speculators_vllm_compat")

_ROOT = "speculators"
_WATCHED = frozenset(
    {
        _ROOT,
        "speculators.data_generation.vllm_hidden_states_generator",
        "speculators.data_generation.custom_worker",
        "transformers",
        "transformers.configuration_utils",
        "vllm.utils",
        "vllm.v1.core.kv_cache_utils",
    }
)


@dataclass(frozen=True)
class PatchStatus:
    """One patch in the installed pair.

    Attributes:
        id: The patch.
        verdict: "needed", "not needed" or "unknown form".
        state: "applied", "waiting" for its module to be imported, "part of X" for one that
            another carries out, "skipped" on request, or "-".
        found: What its probe found.
        where: The file and line that decided.
    """

    id: str
    verdict: str
    state: str
    found: str
    where: str


@dataclass(frozen=True)
class Status:
    """The installed pair and every patch.

    Attributes:
        active: Whether the patches are switched on in this process.
        speculators: Name and version.
        vllm: Distribution and version.
        matrix: What the matrix says of the pair: "verified", "unverified" or "unlisted".
        patches: In the order of application.
        problems: Why speculators' import would stop, in full sentences.
    """

    active: bool
    speculators: str
    vllm: str
    matrix: str
    patches: tuple[PatchStatus, ...]
    problems: tuple[str, ...]


class Activation:
    """The patches of this process; one object, used through the functions below."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._hooks = ImportHooks(_WATCHED, self._before, self._after)
        self._active = False
        self._plan: Plan | None = None
        self._ledger: Ledger | None = None
        self._loaded: set[str] = set()
        self._applied: set[str] = set()
        self._blocks = 0  # how many with-blocks keep the patches on; 0 when switched on by hand

    def apply(self) -> None:
        with self._lock:
            self._blocks = 0
            hooked = self._active
            self._active = True
            os.environ[DRIVER] = str(os.getpid())
            self._hooks.install()  # first, so that no import slips through from here on
        # What follows is done by every caller, so that none returns before another is ready.
        try:
            present = _present(hooked)
            with self._lock:
                self._loaded |= present
                if _ROOT in self._loaded and self._plan is None:
                    self._prepare()
            self._import_for(present)
            with self._lock:
                self._advance()
        except BaseException:
            if not hooked:
                self.revert()
            raise

    def revert(self) -> None:
        with self._lock:
            self._hooks.remove()
            self._blocks = 0
            self._plan = None
            self._loaded.clear()
            self._active = False
            os.environ.pop(DRIVER, None)
            self._undo()
            self._ledger = None

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        with self._lock:
            scoped = not self._active or self._blocks > 0
            blocks = self._blocks
            self.apply()
            self._blocks = blocks + 1 if scoped else 0
        try:
            yield
        finally:
            with self._lock:
                if self._blocks:  # nobody has called apply() or revert() since
                    self._blocks -= 1
                    if not self._blocks:
                        self.revert()

    def status(self) -> Status:
        from .plan import make_plan

        with self._lock:
            plan = self._plan or make_plan()
            patches = tuple(
                PatchStatus(
                    decision.patch.id,
                    decision.finding.verdict.value,
                    self._state(plan, decision.patch),
                    decision.finding.found,
                    decision.finding.where,
                )
                for decision in plan.decisions
            )
            return Status(
                self._active,
                str(plan.speculators),
                str(plan.vllm),
                plan.word,
                patches,
                tuple(str(problem) for problem in plan.problems),
            )

    def _state(self, plan: Plan, patch: Patch) -> str:
        if patch.id in plan.skipped or patch.part_of in plan.skipped:
            return "skipped"
        if patch not in plan.needed or not self._active:
            return "-"
        if patch.part_of:
            return f"part of {patch.part_of}"
        return "applied" if patch.id in self._applied else "waiting"

    def _before(self, name: str) -> None:
        if name == _ROOT:
            with self._lock:
                self._prepare()
            self._import_for(self._loaded)
            with self._lock:
                self._advance()

    def _after(self, name: str) -> None:
        self._import_for({name})
        with self._lock:
            if self._plan is None:
                self._loaded.add(name)
                return
            # A module that ran again holds its original names again.
            self._applied -= {p.id for p in self._plan.needed if p.target == name}
            self._loaded.add(name)
            try:
                self._advance()
            except BaseException:
                # This module's import fails, so it is not there. speculators' own modules that
                # were patched before are forgotten too: the next import of one starts over.
                self._loaded.discard(name)
                self._forget()
                raise

    def _import_for(self, targets: Set[str]) -> None:
        """Import, outside the lock, what patches of these modules need to be applied."""
        plan = self._plan
        for patch in plan.needed if plan is not None else ():
            if patch.target in targets and patch.id not in self._applied:
                for name in patch.imports:
                    importlib.import_module(name)

    def _forget(self) -> None:
        for module in [m for m in sys.modules if m.startswith(f"{_ROOT}.data_generation")]:
            del sys.modules[module]
            self._loaded.discard(module)

    def _prepare(self) -> None:
        """Make the plan; stop here, with nothing changed, if it has problems."""
        if not self._active:
            return
        from .patching import Ledger
        from .plan import make_plan

        plan = make_plan()
        if plan.problems:
            if mode() is not Mode.WARN:
                raise plan.problems[0] if len(plan.problems) == 1 else _together(plan)
            for problem in plan.problems:
                logger.warning("%s", problem)
        if plan.skipped:
            logger.warning("left out on request: %s", ", ".join(sorted(plan.skipped)))
        self._plan = plan
        self._ledger = self._ledger or Ledger()
        logger.info("%s: %d patches, %s", plan, len(plan.needed), plan.word)

    def _advance(self) -> None:
        """Apply every patch whose module exists by now, or undo all of them."""
        try:
            while (patch := self._next()) is not None:
                self._applied.add(patch.id)
                assert patch.apply is not None and self._ledger is not None
                patch.apply(sys.modules[patch.target], self._ledger)
                logger.debug("applied %s: %s", patch.id, patch.summary)
        except BaseException as error:
            self._undo()
            if isinstance(error, CompatError) or not isinstance(error, Exception):
                raise
            assert patch is not None
            raise PatchError(
                f"{patch.id} could not be applied to {patch.target}: {type(error).__name__}: "
                f"{error}. Expected the form its probe knows; every patch was undone. Report this "
                f"with the releases: {self._plan}."
            ) from error

    def _next(self) -> Patch | None:
        needed = self._plan.needed if self._plan and self._active else ()
        return next(
            (
                p
                for p in needed
                if p.apply and p.id not in self._applied and p.target in self._loaded
            ),
            None,
        )

    def _undo(self) -> None:
        if self._ledger is not None:
            self._ledger.undo()
        self._applied.clear()


def _together(plan: Plan) -> CompatError:
    lines = "\n".join(f"  {type(p).__name__}: {p}" for p in plan.problems)
    return CompatError(f"{plan}: {len(plan.problems)} problems\n{lines}")


def _present(hooked: bool) -> set[str]:
    """The watched modules that are imported, after waiting for imports other threads are in.

    Args:
        hooked: Whether the hooks were there before, and so see the end of imports under way.

    Raises:
        ConfigurationError: They were not, and this very thread is importing one: its code would
            go on after the patches.
    """
    present = {name for name in _WATCHED if sys.modules.get(name) is not None}
    for name in sorted(present):
        spec = importlib.import_module(name).__spec__
        if getattr(spec, "_initializing", False):
            present.discard(name)
            if not hooked:
                raise ConfigurationError(
                    f"apply() was called while {name} is being imported, by code that it imports; "
                    "expected before or after. Import speculators_vllm_compat first."
                )
    return present


_activation = Activation()


def apply() -> None:
    """Switch the patches on in this process and in the vLLM workers it starts.

    Patches whose modules are imported already are applied now, the others as soon as their
    module is. Doing it again, from any thread, changes nothing.

    Raises:
        CompatError: speculators is imported already and the pair cannot be patched; nothing
            was changed. When speculators is not imported yet, its import raises instead.
    """
    _activation.apply()


def revert() -> None:
    """Switch the patches off and put back the identical objects.

    A generator that exists keeps its patched workers: create a new one afterwards.
    """
    _activation.revert()


def status() -> Status:
    """What is installed, what each probe found, and what is applied. Imports nothing of it."""
    return _activation.status()


def patched() -> contextlib.AbstractContextManager[None]:
    """Switch the patches on for a block.

    They stay on after it if they were on before, or while another block, perhaps of another
    thread, needs them.
    """
    return _activation.patched()


def activate_by_import() -> None:
    """What importing the package does: apply, unless ``SPECULATORS_VLLM_COMPAT`` is "off"."""
    if mode() is not Mode.OFF:
        apply()
