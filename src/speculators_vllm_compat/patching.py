"""What a patch is, what a probe answers, and the ledger that makes patches reversible."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import wrapt

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from .detect import Package
    from .source import SourceModule, SourceTree

# The modules of speculators that meet vLLM: the first in the driver, the second in the workers.
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
CUSTOM_WORKER = "speculators.data_generation.custom_worker"
GENERATOR_CLASS = "VllmHiddenStatesGenerator"


class Verdict(enum.Enum):
    """What a probe finds about one boundary of the installed pair."""

    NEEDED = "needed"
    NOT_NEEDED = "not needed"
    UNKNOWN_FORM = "unknown form"


@dataclass(frozen=True)
class Finding:
    """A probe's answer.

    Attributes:
        verdict: Whether the patch is needed.
        found: What the source says, in a few words.
        where: ``file:line`` of what decided.
        expected: For an unknown form, the forms that are known.
    """

    verdict: Verdict
    found: str
    where: str
    expected: str = ""


@dataclass(frozen=True)
class Sources:
    """Everything a probe may look at; nothing of it has been imported."""

    vllm: SourceTree
    speculators: SourceTree
    transformers: SourceTree | None
    vllm_package: Package

    @property
    def generator(self) -> SourceModule | None:
        return self.speculators.module("data_generation.vllm_hidden_states_generator")

    @property
    def custom_worker(self) -> SourceModule | None:
        return self.speculators.module("data_generation.custom_worker")


@dataclass(frozen=True)
class Patch:
    """One boundary, and what adapts it.

    Attributes:
        id: The boundary's name, after the API it is about.
        summary: What the patch does.
        why: What changed upstream, or what is wrong there.
        upstream: Where to read of it: a file of vLLM or speculators, with the release.
        process: The process whose behaviour it changes.
        target: The module that must have been imported before it is applied.
        probe: Decides from the source whether it is needed.
        apply: Binds the adapter, or None for a boundary whose adapter is called by the
            patch named in ``part_of``.
        part_of: The patch that carries this one out.
        imports: Modules that ``apply`` uses. They are imported beforehand, because ``apply`` runs
            under a lock and must not wait there for another thread's import.
        depends_on: "pair" when the releases of speculators and vLLM decide, "environment" when
            the transformers release or the device does; the matrix lists only the former.
        removable: When the patch can go.
    """

    id: str
    summary: str
    why: str
    upstream: str
    process: Literal["driver", "worker", "both"]
    probe: Callable[[Sources], Finding]
    removable: str
    target: str = ""
    apply: Callable[[ModuleType, Ledger], None] | None = None
    part_of: str = ""
    imports: tuple[str, ...] = ()
    depends_on: Literal["pair", "environment"] = "pair"


class Ledger:
    """Every change made to another module, so that each can be taken back.

    Changes go through it and through nothing else; ``undo`` restores the identical objects.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def wrap(self, owner: Any, name: str, wrapper: Any) -> None:
        """Put a function around a callable attribute (wrapt's calling convention)."""
        switch = _Switch()
        handle = wrapt.wrap_object(owner, name, wrapt.FunctionWrapper, (wrapper, switch))
        self._undo.append(lambda: self._unwrap(owner, name, handle, switch))

    def proxy(self, owner: Any, name: str, factory: type[Proxy]) -> None:
        """Put an object proxy around an attribute that is not only called."""
        switch = _Switch()
        handle = wrapt.wrap_object(owner, name, factory, (switch,))
        self._undo.append(lambda: self._unwrap(owner, name, handle, switch))

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Give a name that is gone back to a module or class; refuses to replace one."""
        if name in vars(owner):
            raise AttributeError(f"{owner!r} has {name!r} already; only a missing name is added")
        setattr(owner, name, value)

        def remove() -> None:
            if vars(owner).get(name) is value:
                delattr(owner, name)

        self._undo.append(remove)

    def add_item(self, mapping: dict[str, Any], key: str, value: Any) -> None:
        """Enter a missing key into a mapping, such as ``sys.modules`` or ``os.environ``."""
        if key in mapping:
            raise KeyError(f"{key!r} is there already; only a missing entry is added")
        mapping[key] = value

        def remove() -> None:
            if mapping.get(key) is value:
                del mapping[key]

        self._undo.append(remove)

    def mark(self) -> int:
        """A point to go back to with :meth:`undo`."""
        return len(self._undo)

    def undo(self, mark: int = 0) -> None:
        """Take back every change made since a mark, the last one first.

        One that cannot be taken back does not keep the others from it; its error is raised then.
        """
        failure: Exception | None = None
        while len(self._undo) > mark:
            try:
                self._undo.pop()()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    @staticmethod
    def _unwrap(owner: Any, name: str, handle: Any, switch: _Switch) -> None:
        switch.on = False  # whoever still holds the wrapper gets the original's behaviour
        try:
            wrapt.unwrap_object(owner, name, handle, missing_ok=True)
        except wrapt.WrapperNotOutermostError:
            # Somebody put their own wrapper over ours. Theirs stays; ours passes through now.
            return


class Proxy(wrapt.ObjectProxy[Any]):
    """An object of which some attributes are others, until it is switched off.

    Args:
        wrapped: The object.
        switch: Says whether ``changed`` counts.
    """

    def __init__(self, wrapped: Any, switch: Callable[[], bool]) -> None:
        super().__init__(wrapped)
        self._self_switch = switch

    def changed(self) -> dict[str, Any]:
        """The attributes that are others, by name."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        changed = self.changed() if self._self_switch() else {}
        return changed[name] if name in changed else getattr(self.__wrapped__, name)


class _Switch:
    """Whether a wrapper does anything; wrapt calls it before each call of the wrapper."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self) -> bool:
        return self.on
