"""What the installed pair needs: every probe's answer, held against the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import matrix
from .detect import Package, detect
from .errors import CompatError, MatrixError, UnknownFormError
from .patches import PATCHES
from .patching import Finding, Patch, Sources, Verdict
from .switches import SKIP, skipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True)
class Decision:
    """One patch and what its probe found."""

    patch: Patch
    finding: Finding


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before anything is imported or changed.

    Attributes:
        speculators: The installed speculators.
        vllm: The installed vLLM.
        transformers: The installed transformers.
        cell: The matrix's entry for the pair, or None when it has none.
        decisions: One for every patch, in the order of application.
        skipped: Ids of patches left out on request.
        problems: Why the plan should not be carried out.
    """

    speculators: Package
    vllm: Package
    transformers: Package
    cell: matrix.Cell | None
    decisions: tuple[Decision, ...]
    skipped: frozenset[str]
    problems: tuple[CompatError, ...]

    @property
    def needed(self) -> tuple[Patch, ...]:
        """The patches to apply, in order."""
        return tuple(
            d.patch
            for d in self.decisions
            if d.finding.verdict is Verdict.NEEDED and d.patch.id not in self.skipped
        )

    @property
    def word(self) -> str:
        """What the matrix says of the pair: verified, unverified or unlisted."""
        return self.cell.word if self.cell else "unlisted"

    def __str__(self) -> str:
        return f"{self.speculators} on {self.vllm}"


def make_plan(given: Mapping[str, Package] | None = None) -> Plan:
    """Probe a pair's source. Nothing of it is imported; problems are collected, not raised.

    Args:
        given: Packages to look at in place of the installed ones, by module.
    """
    given = given or {}
    vllm, speculators, transformers = (
        given.get(module) or detect(module) for module in ("vllm", "speculators", "transformers")
    )
    problems: list[CompatError] = [*vllm.problems, *speculators.problems]
    left_out = skipped()
    decisions = tuple(_decide(vllm, speculators, transformers))
    unknown_ids = left_out - {patch.id for patch in PATCHES}
    if unknown_ids:
        problems.append(
            CompatError(
                f"{SKIP} names {', '.join(sorted(unknown_ids))}; expected ids of patches: "
                f"{', '.join(p.id for p in PATCHES)}.",
                "Correct it, or unset it.",
            )
        )
    problems += [
        UnknownFormError(
            f"{d.patch.id}: {d.finding.where}: found {d.finding.found}; expected "
            f"{d.finding.expected}. This form is not known, so nothing is patched.",
            "Install a pair from the table of supported ones, or set SPECULATORS_VLLM_COMPAT=warn "
            "to go on without this patch.",
        )
        for d in decisions
        if d.finding.verdict is Verdict.UNKNOWN_FORM and d.patch.id not in left_out
    ]
    cell = matrix.load().find(speculators.version, vllm.version)
    if cell is not None and not problems:
        problems += _disagreement(cell, vllm, decisions)
    return Plan(speculators, vllm, transformers, cell, decisions, left_out, tuple(problems))


def _decide(vllm: Package, speculators: Package, transformers: Package) -> Iterator[Decision]:
    if speculators.source is None:
        return
    generator = speculators.source.find("data_generation.vllm_hidden_states_generator")
    for patch in PATCHES:
        # Where there is no generator to patch, as without vLLM in a training environment, or
        # with speculators 0.5 and later, only what importing speculators needs is left.
        if patch.depends_on == "environment" and patch.target.startswith("transformers"):
            if transformers.source is None:
                continue
        elif vllm.source is None or generator is None:
            continue
        # A probe about transformers looks at no file of vLLM's.
        nowhere = vllm.source or speculators.source
        sources = Sources(nowhere, speculators.source, transformers.source, vllm)
        yield Decision(patch, run_probe(patch, sources))


def run_probe(patch: Patch, sources: Sources) -> Finding:
    """A probe's answer; an unknown form where it cannot read the source."""
    try:
        return patch.probe(sources)
    except Exception as error:  # source that cannot be parsed, or that a probe did not foresee
        where = getattr(error, "filename", None) or str(sources.vllm.root)
        where += f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        found = f"{type(error).__name__}: {error}"
        return Finding(Verdict.UNKNOWN_FORM, found, where, "source that its probe can read")


def _disagreement(
    cell: matrix.Cell, vllm: Package, decisions: tuple[Decision, ...]
) -> Iterator[MatrixError]:
    """The probes against the matrix; not for a nightly, which lies on either side of a change."""
    version = vllm.version
    if version is None or version.is_prerelease or version.base_version != str(cell.vllm.version):
        return
    pair = [d for d in decisions if d.patch.depends_on == "pair"]
    found = {d.patch.id: d.finding for d in pair if d.finding.verdict is Verdict.NEEDED}
    if found.keys() != cell.patches:
        extra = sorted(found.keys() - cell.patches)
        lacking = sorted(cell.patches - found.keys())
        wheres = "; ".join(f"{name}: {found[name].where}" for name in extra)
        yield MatrixError(
            f"speculators {cell.speculators} on vLLM {version}: the matrix expects other patches "
            f"than the probes ask for. Only by the probes: {extra or 'none'} ({wheres}); only by "
            f"the matrix: {lacking or 'none'}. The installed source is not that release's:",
            "reinstall vLLM, or set SPECULATORS_VLLM_COMPAT=warn to trust the probes.",
        )
