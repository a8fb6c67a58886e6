"""What ``check`` finds, as data."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .. import matrix
from ..patching import Verdict
from ..plan import make_plan
from .notices import (
    LEVELS,
    START_METHOD,
    Installed,
    Notice,
    all_notices,
    of_error,
    unpatched_workers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..detect import Package
    from ..errors import CompatError
    from ..plan import Decision, Plan

SCHEMA = 1
_STATES = {
    Verdict.NEEDED: "patched",
    Verdict.NOT_NEEDED: "as is",
    Verdict.UNKNOWN_FORM: "unknown form",
}


@dataclass(frozen=True)
class Component:
    """One thing that is installed, or was given in its place.

    Attributes:
        module: What is imported.
        name: The distribution.
        version: "" when it is not known.
        location: Its folder, or the archive it was read from; "" when there is none.
    """

    module: str
    name: str
    version: str
    location: str


@dataclass(frozen=True)
class Boundary:
    """One place where speculators meets vLLM or transformers.

    Attributes:
        id: The boundary, and the patch for it.
        state: "as is", "patched", "unknown form" or "skipped".
        process: Whose behaviour the patch changes: "driver", "worker" or "both".
        found: What the source says.
        where: ``file:line``, relative to the folder the package lies in.
        expected: For an unknown form, the forms that are known.
    """

    id: str
    state: str
    process: str
    found: str
    where: str
    expected: str


@dataclass(frozen=True)
class Report:
    """Everything ``check`` tells.

    Attributes:
        components: speculators, vllm, transformers, torch and python.
        word: The matrix's word for the pair: "verified", "unverified" or "unlisted".
        cell: The pair the word is about, as "speculators on vLLM"; "" when unlisted.
        verified: The runs whose values were compared with transformers.
        boundaries: In the order of application.
        workers: What decides whether and how workers are patched.
        notices: What will bite, problems first.
    """

    components: tuple[Component, ...]
    word: str
    cell: str
    verified: tuple[matrix.Verified, ...]
    boundaries: tuple[Boundary, ...]
    workers: Mapping[str, Any]
    notices: tuple[Notice, ...]

    @property
    def fine(self) -> bool:
        return not any(notice.level == "problem" for notice in self.notices)

    def count(self, state: str) -> int:
        """How many boundaries have a state."""
        return sum(boundary.state == state for boundary in self.boundaries)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values; the names and meanings of schema 1 stay."""
        return {
            "schema": SCHEMA,
            "fine": self.fine,
            "components": [asdict(component) for component in self.components],
            "matrix": {
                "word": self.word,
                "cell": self.cell,
                "verified": [asdict(run) for run in self.verified],
            },
            "boundaries": [asdict(boundary) for boundary in self.boundaries],
            "workers": dict(self.workers),
            "notices": [asdict(notice) for notice in self.notices],
        }


def examine(given: Mapping[str, Package]) -> Report:
    """Look at the installed pair, or at what is given in place of it. Imports nothing of it."""
    plan = make_plan(given)
    packages = (plan.speculators, plan.vllm, plan.transformers)
    versions = Installed()
    unpatched = unpatched_workers()
    found = all_notices(plan, _release(plan), versions) + ([unpatched] if unpatched else [])
    shorter = _Shorter(packages)
    return Report(
        components=(*map(_component, packages), *_surroundings(versions)),
        word=plan.word,
        cell=f"{plan.cell.speculators} on {plan.cell.vllm.version}" if plan.cell else "",
        verified=plan.cell.verified if plan.cell else (),
        boundaries=tuple(_boundary(d, plan, shorter) for d in plan.decisions),
        workers={
            "patched": unpatched is None,
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS"),
            # The CPU platform of vLLM forces spawn, whatever the variable says.
            "start_method": "spawn"
            if plan.vllm.cpu_build
            else os.environ.get(START_METHOD, "fork"),
        },
        notices=tuple(
            Notice(n.level, shorter(n.found), shorter(n.remedy))
            for n in sorted(found, key=lambda n: LEVELS.index(n.level))
        ),
    )


def unusable(error: CompatError) -> Report:
    """The report when not even a plan could be made."""
    return Report(tuple(_surroundings(Installed())), "", "", (), (), {}, (of_error(error),))


def _release(plan: Plan) -> matrix.Release | None:
    """What the matrix says of the vLLM release, whatever the speculators beside it."""
    version = plan.vllm.version
    releases = matrix.load().releases if version is not None else ()
    return next((r for r in releases if version is not None and r.covers(version)), None)


def _component(package: Package) -> Component:
    name = package.distribution.name if package.distribution else package.module
    location = str(package.location or "")
    return Component(package.module, name, package.version_text or "", location)


def _surroundings(versions: Installed) -> list[Component]:
    torch = versions.version("torch")
    return [
        Component("torch", "torch", str(torch or ""), ""),
        Component("python", "python", platform.python_version(), sys.executable),
    ]


def _boundary(decision: Decision, plan: Plan, shorter: _Shorter) -> Boundary:
    patch, finding = decision.patch, decision.finding
    skipped = patch.id in plan.skipped or patch.part_of in plan.skipped
    return Boundary(
        id=patch.id,
        state="skipped" if skipped else _STATES[finding.verdict],
        process=patch.process,
        found=shorter(finding.found),
        where=shorter(finding.where),
        expected=shorter(finding.expected),
    )


class _Shorter:
    """Leaves out of a text the folders that packages lie in; the components tell them."""

    def __init__(self, packages: tuple[Package, ...]) -> None:
        self._folders = sorted({f"{p.root.parent}/" for p in packages if p.root}, key=len)[::-1]
        self._modules = tuple(p.module for p in packages)

    def __call__(self, text: str) -> str:
        for folder in self._folders:
            for module in self._modules:
                text = text.replace(f"{folder}{module}/", f"{module}/")
        return text
