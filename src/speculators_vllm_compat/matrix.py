"""compat_matrix.yaml as frozen dataclasses: the only place where versions are written.

The matrix never decides what is patched; the probes do. It says what to expect of them for
a release that was looked at, and what evidence there is.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .errors import MatrixError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA = 1
FILE_NAME = "compat_matrix.yaml"


@dataclass(frozen=True)
class Release:
    """One vLLM release and what goes with it.

    Attributes:
        version: The release.
        versions: Every version that belongs to it, nightlies and candidates included.
        torch: The torch it is built for.
        transformers: The transformers it accepts.
        python: The Python versions it accepts.
        environment: The requirements its test environment is built with.
    """

    version: Version
    versions: SpecifierSet
    torch: str
    transformers: str
    python: str
    environment: tuple[str, ...]

    def covers(self, version: Version) -> bool:
        return self.versions.contains(version, prereleases=True)


@dataclass(frozen=True)
class Verified:
    """A run with values compared with transformers.

    Attributes:
        date: The day of the run, ISO 8601.
        device: Where it ran: "cpu" or a GPU's name.
        largest_difference: Over every case, absolute.
        cases: How many cases were compared.
        evidence: The file that holds the run's values, relative to the repository.
    """

    date: str
    device: str
    largest_difference: float
    cases: int
    evidence: str


@dataclass(frozen=True)
class Cell:
    """One pair of speculators and vLLM.

    Attributes:
        speculators: The release of speculators.
        vllm: The release of vLLM.
        patches: The patches the probes are expected to ask for.
        verified: Runs with values compared; empty when there was none.
    """

    speculators: Version
    vllm: Release
    patches: frozenset[str]
    verified: tuple[Verified, ...]

    @property
    def word(self) -> str:
        """What the matrix says of the pair, in one word."""
        return "verified" if self.verified else "unverified"


@dataclass(frozen=True)
class Matrix:
    """The whole file."""

    releases: tuple[Release, ...]
    cells: tuple[Cell, ...]

    def find(self, speculators: Version | None, vllm: Version | None) -> Cell | None:
        """The cell of a pair, or None for versions the matrix does not know."""
        if speculators is None or vllm is None:
            return None
        return next(
            (c for c in self.cells if c.speculators == speculators and c.vllm.covers(vllm)),
            None,
        )


@cache
def load() -> Matrix:
    """The matrix that travels with the package."""
    path = Path(__file__).with_name(FILE_NAME)
    if not path.is_file():  # an editable install, where the file stays at the top of the checkout
        path = Path(__file__).parents[2] / FILE_NAME
    if not path.is_file():
        raise MatrixError(
            f"{FILE_NAME} was not found beside {Path(__file__).parent}: the installation is "
            "incomplete.",
            "Install the package again.",
        )
    return parse(path.read_text(encoding="utf-8"), str(path))


def parse(text: str, source: str, known_patches: Iterable[str] | None = None) -> Matrix:
    """Read and validate a matrix.

    Args:
        text: The YAML.
        source: Where it came from, for messages.
        known_patches: When given, every patch a cell names must be among them.

    Raises:
        MatrixError: The text is not valid; the message names the place and what was expected.
    """
    try:
        data = yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise MatrixError(f"{source} is not YAML: {error}.", "Mend it.") from error
    reader = _Reader(source, frozenset(known_patches) if known_patches is not None else None)
    return reader.matrix(data)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is written twice; YAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.YAMLError(f"the key {key!r} is written twice{node.start_mark}")
        return super().construct_mapping(node, deep)


class _Reader:
    def __init__(self, source: str, known: frozenset[str] | None) -> None:
        self._source = source
        self._known = known

    def matrix(self, data: Any) -> Matrix:
        top = self._mapping(data, "the file", {"schema", "releases", "cells"})
        if top["schema"] != SCHEMA or isinstance(top["schema"], bool):
            raise self._error("schema", f"{SCHEMA}", top["schema"])
        releases = tuple(
            self._release(item, f"releases[{index}]")
            for index, item in enumerate(self._list(top["releases"], "releases"))
        )
        self._refuse_overlap(releases)
        by_version = {str(r.version): r for r in releases}
        cells = tuple(
            self._cell(item, f"cells[{index}]", by_version)
            for index, item in enumerate(self._list(top["cells"], "cells"))
        )
        pairs = [(c.speculators, c.vllm.version) for c in cells]
        for index, pair in enumerate(pairs):
            if pair in pairs[:index]:
                raise self._error(f"cells[{index}]", "each pair once", f"{pair[0]} x {pair[1]}")
        return Matrix(releases, cells)

    def _release(self, item: Any, place: str) -> Release:
        names = {"version", "versions", "torch", "transformers", "python", "environment"}
        fields = self._mapping(item, place, names)
        version = self._version(fields["version"], f"{place}.version")
        try:
            versions = SpecifierSet(self._text(fields["versions"], f"{place}.versions"))
        except InvalidSpecifier as error:
            raise self._error(
                f"{place}.versions", "PEP 440 specifiers", fields["versions"]
            ) from error
        if not versions.contains(version, prereleases=True):
            raise self._error(f"{place}.versions", f"a range that holds {version}", versions)
        texts = {
            k: self._text(fields[k], f"{place}.{k}") for k in ("torch", "transformers", "python")
        }
        environment = self._texts(fields["environment"], f"{place}.environment")
        return Release(version, versions, environment=environment, **texts)

    def _cell(self, item: Any, place: str, releases: Mapping[str, Release]) -> Cell:
        fields = self._mapping(item, place, {"speculators", "vllm", "patches", "verified"})
        vllm = self._text(fields["vllm"], f"{place}.vllm")
        if vllm not in releases:
            raise self._error(f"{place}.vllm", f"one of {sorted(releases)}", vllm)
        patches = self._texts(fields["patches"], f"{place}.patches")
        unknown = sorted(set(patches) - self._known) if self._known is not None else []
        if unknown:
            raise self._error(f"{place}.patches", "ids of patches", ", ".join(unknown))
        verified = tuple(
            self._verified(entry, f"{place}.verified[{index}]")
            for index, entry in enumerate(self._list(fields["verified"], f"{place}.verified"))
        )
        speculators = self._version(fields["speculators"], f"{place}.speculators")
        return Cell(speculators, releases[vllm], frozenset(patches), verified)

    def _verified(self, item: Any, place: str) -> Verified:
        names = {"date", "device", "largest_difference", "cases", "evidence"}
        fields = self._mapping(item, place, names)
        difference, cases = fields["largest_difference"], fields["cases"]
        if not isinstance(difference, float) or not 0 <= difference < float("inf"):
            raise self._error(f"{place}.largest_difference", "a number such as 6.0e-6", difference)
        if not isinstance(cases, int) or isinstance(cases, bool) or cases < 1:
            raise self._error(f"{place}.cases", "a count of at least 1", cases)
        texts = {k: self._text(fields[k], f"{place}.{k}") for k in ("date", "device", "evidence")}
        try:
            datetime.date.fromisoformat(texts["date"])
        except ValueError as error:
            raise self._error(f"{place}.date", "a day such as 2026-01-31", texts["date"]) from error
        return Verified(largest_difference=difference, cases=cases, **texts)

    def _refuse_overlap(self, releases: tuple[Release, ...]) -> None:
        """Each release, and each edge of a range, lies in one range at most."""
        edges = {Version(s.version) for r in releases for s in r.versions if "*" not in s.version}
        for version in [*(r.version for r in releases), *sorted(edges)]:
            holders = [str(o.version) for o in releases if o.covers(version)]
            if len(holders) > 1:
                raise self._error("releases", f"one range to hold {version}", ", ".join(holders))

    def _mapping(self, value: Any, place: str, keys: set[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict) or set(value) != keys:
            found = sorted(map(str, value)) if isinstance(value, dict) else value
            raise self._error(place, f"the keys {sorted(keys)}", found)
        return value

    def _list(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(place, "a list", value)
        return value

    def _text(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not value:
            raise self._error(place, "a text in quotes", value)
        return value

    def _texts(self, value: Any, place: str) -> tuple[str, ...]:
        return tuple(self._text(item, place) for item in self._list(value, place))

    def _version(self, value: Any, place: str) -> Version:
        try:
            return Version(self._text(value, place))
        except InvalidVersion as error:
            raise self._error(place, "a PEP 440 version", value) from error

    def _error(self, place: str, expected: str, found: Any) -> MatrixError:
        return MatrixError(
            f"{self._source}: {place}: expected {expected}, found {found!r}.", "Mend that entry."
        )
