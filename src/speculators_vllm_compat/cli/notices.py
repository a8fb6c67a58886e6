"""What will bite in this environment, known from files, metadata and variables alone."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from ..detect import header, installed, parse_version
from ..errors import CompatError, UnknownFormError, WorkerError
from ..patches.worker_plugin import refuse_unpatched_workers
from ..patching import Verdict
from ..switches import MODE, SKIP, Mode, forward_mode, mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib import metadata

    from packaging.version import Version

    from ..detect import Package
    from ..matrix import Release
    from ..plan import Decision, Plan

# Of speculators' requirements, those that importing its generator imports. pip install --no-deps,
# which keeps its torch pin away, leaves them out as well.
_IMPORTED_BY_SPECULATORS = ("loguru", "pydantic", "safetensors", "tqdm")
# Of transformers' requirements, those whose versions it checks when it is imported.
_CHECKED_BY_TRANSFORMERS = (
    "huggingface-hub",
    "numpy",
    "packaging",
    "pyyaml",
    "regex",
    "safetensors",
    "tokenizers",
    "tqdm",
)

# vLLM's queues: ten chunks of VLLM_MQ_MAX_CHUNK_BYTES_MB to the workers, and ten of 24 MiB back
# from each of them.
_SHM = Path("/dev/shm")
_CHUNKS = 10
_REPLY_CHUNK = 24
_REQUEST_CHUNK = "16"

LEVELS = ("problem", "warning", "note")
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


@dataclass(frozen=True)
class Notice:
    """One thing worth knowing before a model is loaded.

    Attributes:
        level: "problem": the generator will not run, or not right; "warning": it may not;
            "note": something else will not.
        found: What is there, and what was expected.
        remedy: What to do.
    """

    level: Literal["problem", "warning", "note"]
    found: str
    remedy: str


class Installed:
    """The versions of what is installed, by name."""

    def __init__(self) -> None:
        self._found: dict[str, metadata.Distribution] = {}
        for name, distribution in installed():
            self._found.setdefault(name, distribution)  # the first one on the import path counts

    def version(self, name: str) -> Version | None:
        found = self._found.get(name)
        return parse_version(header(found, "Version")) if found is not None else None


def all_notices(plan: Plan, release: Release | None, versions: Installed) -> list[Notice]:
    """Everything found but what :func:`unpatched_workers` tells."""
    return [
        *_missing(plan),
        *_plan_problems(plan),
        *_matrix(plan),
        *_start_method(),
        *_switches(plan),
        *_versions(plan, release, versions),
        *_requirements(plan, versions),
        *_training(plan),
        *_shared_memory(),
        *_shadows(plan),
    ]


def of_error(error: CompatError) -> Notice:
    """An error of this package as a problem."""
    return Notice("problem", error.message, error.remedy)


def _missing(plan: Plan) -> Iterator[Notice]:
    install = {
        "speculators": "Install it without its requirements, whose torch pin would break vLLM: "
        "pip install --no-deps speculators",
        "vllm": "Install it: pip install vllm",
        "transformers": "Install it: pip install transformers",
    }
    for package in (plan.speculators, plan.vllm, plan.transformers):
        if package.root is None and not package.problems:
            yield Notice(
                "problem",
                f"No {package.module} is installed for {sys.executable}.",
                install[package.module],
            )
    source = plan.speculators.source
    generator = "data_generation.vllm_hidden_states_generator"
    if source is not None and source.find(generator) is None:
        yield Notice(
            "problem",
            f"{plan.speculators} has no {source.where(generator)}, and so no "
            "VllmHiddenStatesGenerator: there is nothing to patch.",
            "Install a speculators release from the table of supported pairs, without its "
            "requirements: pip install --no-deps speculators==VERSION",
        )


def _plan_problems(plan: Plan) -> Iterator[Notice]:
    for problem in plan.problems:
        if not isinstance(problem, UnknownFormError):
            yield of_error(problem)
    # A file that is missing or broken is told once, with every boundary that it holds up.
    alike: dict[tuple[str, str], list[Decision]] = {}
    for decision in plan.decisions:
        finding = decision.finding
        if finding.verdict is Verdict.UNKNOWN_FORM and decision.patch.id not in plan.skipped:
            alike.setdefault((finding.where, finding.found), []).append(decision)
    for (where, found), decisions in alike.items():
        broken = found.startswith(("SyntaxError", "UnicodeDecodeError", "no such file"))
        yield Notice(
            "problem",
            f"{', '.join(d.patch.id for d in decisions)}: {where}: found {found}; expected "
            f"{decisions[0].finding.expected}. This form is not known, so nothing gets patched.",
            "Install that package again, or a pair from the table of supported ones."
            if broken
            else f"Install a pair from the table of supported ones, or set {MODE}=warn to go on "
            "without this patch.",
        )


def _matrix(plan: Plan) -> Iterator[Notice]:
    if not plan.decisions or plan.vllm.root is None or plan.word == "verified":
        return
    reason = {
        "unverified": "no run has compared its values with transformers'",
        "unlisted": "the matrix does not list the pair; the probes alone decide",
    }[plan.word]
    yield Notice(
        "warning",
        f"{plan} is {plan.word}: {reason}.",
        "Compare a few sequences with transformers before a long run, or take a verified pair.",
    )


def unpatched_workers() -> Notice | None:
    """Why vLLM would not patch a spawned worker, or None when it will."""
    try:
        refuse_unpatched_workers()
    except WorkerError as error:
        return of_error(error)
    return None


def _start_method() -> Iterator[Notice]:
    method = os.environ.get(START_METHOD)
    if method is not None and method not in ("fork", "spawn"):
        yield Notice(
            "problem",
            f"{START_METHOD} is {method!r}; vLLM expects fork or spawn.",
            "Unset it: vLLM then forks, and spawns where it has to.",
        )


def _switches(plan: Plan) -> Iterator[Notice]:
    if mode() is Mode.OFF:
        yield Notice(
            "warning",
            f"{MODE} is off: importing speculators_vllm_compat does nothing.",
            f"Unset {MODE}, or call speculators_vllm_compat.apply() in the script.",
        )
    if plan.skipped:
        yield Notice(
            "warning",
            f"{SKIP} leaves out {', '.join(sorted(plan.skipped))}.",
            f"Unset {SKIP} when you have found out what they do.",
        )
    try:
        forward_mode()
    except CompatError as error:
        yield of_error(error)


def _versions(plan: Plan, release: Release | None, versions: Installed) -> Iterator[Notice]:
    transformers = plan.transformers.version
    wanted = release.transformers if release is not None else _required(plan.vllm, "transformers")
    if transformers is not None and not _fits(wanted, transformers):
        yield Notice(
            "problem",
            f"transformers {transformers} is installed; {plan.vllm} needs {wanted}: its import "
            "fails, or models of it do.",
            f'pip install "transformers{wanted}"',
        )
    pydantic = _required(plan.vllm, "pydantic")
    found = versions.version("pydantic")
    if found is not None and not _fits(pydantic, found):
        yield Notice(
            "problem",
            f"pydantic {found} is installed; {plan.vllm} needs {pydantic}: its configuration "
            "classes fail at import.",
            f'pip install "pydantic{pydantic}"',
        )
    if release is None:
        return
    python = platform.python_version()
    if not _fits(release.python, parse_version(python)):
        yield Notice(
            "problem",
            f"This is Python {python}; {plan.vllm} needs {release.python}.",
            "Make a new environment with such a Python.",
        )
    torch, built_for = versions.version("torch"), parse_version(release.torch)
    if torch is not None and built_for is not None and torch.release[:2] != built_for.release[:2]:
        yield Notice(
            "problem",
            f"torch {torch} is installed; {plan.vllm} is built for {release.torch}: its binaries "
            "fail to load (undefined symbol). Installing speculators with its requirements "
            "replaces torch.",
            f"pip install torch=={release.torch}, and speculators with --no-deps",
        )


def _requirements(plan: Plan, versions: Installed) -> Iterator[Notice]:
    for requirement in _requirements_of(plan.transformers, _CHECKED_BY_TRANSFORMERS):
        found = versions.version(requirement.name.lower().replace("_", "-"))
        if found is None or not _fits(str(requirement.specifier), found):
            shown = f"{requirement.name} {found} is installed" if found else "it is not installed"
            yield Notice(
                "problem",
                f"{plan.transformers} needs {requirement}, and checks it at import; {shown}.",
                f'pip install "{requirement}"',
            )
    for requirement in _requirements_of(plan.speculators, _IMPORTED_BY_SPECULATORS):
        if versions.version(requirement.name) is None:
            yield Notice(
                "problem",
                f"{plan.speculators} imports {requirement.name}, which is not installed; "
                "pip install --no-deps leaves it out.",
                f'pip install "{requirement}"',
            )


def _training(plan: Plan) -> Iterator[Notice]:
    """Known from trials: the configuration classes of transformers 5 are dataclasses."""
    for decision in plan.decisions:
        name, finding = decision.patch.id, decision.finding
        if name == "pretrained_config_torch" and finding.verdict is Verdict.NEEDED:
            yield Notice(
                "note",
                f"Training and conversion with {plan.speculators} fail on {plan.transformers}: no "
                "attribute '__pydantic_fields_set__'. Extracting hidden states does not need them.",
                "Train in another environment, with transformers below 5.",
            )


def _shared_memory() -> Iterator[Notice]:
    if not hasattr(os, "statvfs") or not _SHM.is_dir():
        return
    state = os.statvfs(_SHM)
    free = state.f_bavail * state.f_frsize >> 20
    request = os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB", _REQUEST_CHUNK)
    needed = _CHUNKS * (int(request if request.isdigit() else _REQUEST_CHUNK) + _REPLY_CHUNK)
    if free < needed:
        yield Notice(
            "problem",
            f"{_SHM} has {free} MiB free; vLLM's queues to and from one worker map {needed} MiB "
            f"there, and {_CHUNKS * _REPLY_CHUNK} MiB more for each further GPU. A worker that "
            "finds none left dies with a bus error.",
            "Start the container with --ipc=host or --shm-size=8g, or mount a larger tmpfs.",
        )


def _shadows(plan: Plan) -> Iterator[Notice]:
    """Folders that an import from a script or a notebook started here would take instead."""
    here = Path.cwd()
    if any(Path(entry).resolve() == here.resolve() for entry in sys.path):
        return  # then detection has seen them
    for module in ("vllm", "speculators", "transformers", "torch"):
        candidates = (here / module / "__init__.py", here / f"{module}.py")
        roots = {p.root for p in (plan.vllm, plan.speculators, plan.transformers) if p.root}
        for path in candidates:
            if path.is_file() and path.parent not in roots:
                shown = path.parent if path.name == "__init__.py" else path
                yield Notice(
                    "warning",
                    f"{shown} shadows the installed {module} for python -c, python -m, notebooks, "
                    "and scripts in this folder.",
                    "Start from another folder, or rename it.",
                )


def _required(package: Package, name: str) -> str:
    """The versions of a requirement that a package's metadata asks for; "" when it does not."""
    return next((str(r.specifier) for r in _requirements_of(package, (name,))), "")


def _requirements_of(package: Package, names: tuple[str, ...]) -> Iterator[Requirement]:
    for text in package.distribution.requires if package.distribution else ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name.lower().replace("_", "-") in names:
            yield requirement


def _fits(specifier: str, version: Version | None) -> bool:
    return version is None or SpecifierSet(specifier).contains(version, prereleases=True)
