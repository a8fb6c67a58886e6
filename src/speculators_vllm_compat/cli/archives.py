"""A package that is not installed: an unpacked tree, a wheel or a source distribution."""

from __future__ import annotations

import tarfile
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..detect import Distribution, Package, headers, providers
from ..errors import ConfigurationError
from ..source import SourceTree

if TYPE_CHECKING:
    from collections.abc import Callable

_SOURCE_ARCHIVES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar")


def package_at(module: str, path: Path, scratch: Path) -> Package:
    """The package in a folder or an archive, as if it were the installed one.

    Args:
        module: Its module, such as ``vllm``.
        path: The package's folder, one that holds it, a wheel, or a source distribution.
        scratch: A folder for the files that are read out of an archive.

    Raises:
        ConfigurationError: There is no such module in it, or it is none of these.
    """
    if path.is_dir():
        return _in_folder(module, path)
    if path.is_file() and path.name.endswith((".whl", ".zip")):
        return _in_archive(module, path, scratch, _zip_reader(path))
    if path.is_file() and path.name.endswith(_SOURCE_ARCHIVES):
        return _in_archive(module, path, scratch, _tar_reader(path, module))
    found = "is a file of another kind" if path.is_file() else "does not exist"
    raise ConfigurationError(
        f"{path} {found}; expected the folder {module}, one that holds it, a wheel (.whl) or a "
        "source distribution (.tar.gz).",
        "Correct the path.",
    )


def _in_folder(module: str, path: Path) -> Package:
    # A checkout may keep its packages in src/.
    for root in (path / module, path / "src" / module, path):
        named = root is not path or path.resolve().name == module
        if named and (root / "__init__.py").is_file():
            found = tuple(providers(module, [str(root.resolve().parent)]))
            return Package(module, root.resolve(), found)
    raise _without(module, path)


def _without(module: str, path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} holds no {module}/__init__.py; expected a tree, a wheel or a source distribution "
        f"of {module}.",
        "Correct the path.",
    )


@dataclass(frozen=True)
class _Reader:
    """The files of an archive, by their paths in it."""

    names: frozenset[str]
    read: Callable[[str], bytes]


def _zip_reader(path: Path) -> _Reader:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise _unreadable(path, error) from error
    return _Reader(frozenset(archive.namelist()), archive.read)


def _tar_reader(path: Path, module: str) -> _Reader:
    """One pass over the archive, which cannot be read out of order without starting over."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                wanted = parts[-1:] == ("PKG-INFO",) or (
                    module in parts[:-1] and member.name.endswith(".py")
                )
                content = archive.extractfile(member) if wanted and member.isfile() else None
                if content is not None:
                    files[member.name] = content.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise _unreadable(path, error) from error
    return _Reader(frozenset(files), files.__getitem__)


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"{path} cannot be read: {error}; expected a complete wheel or source distribution.",
        "Download it again.",
    )


def _in_archive(module: str, path: Path, scratch: Path, reader: _Reader) -> Package:
    starts = sorted(
        (name for name in reader.names if f"/{name}".endswith(f"/{module}/__init__.py")), key=len
    )
    if not starts:
        raise _without(module, path)
    prefix = starts[0][: -len(f"{module}/__init__.py")]
    found = tuple(
        Distribution(name, version, path, tuple(headers(info, "Requires-Dist")))
        for info in _metadata(reader)
        for name in headers(info, "Name")[:1]
        for version in headers(info, "Version")[:1]
    )
    root = scratch / module
    return ArchivedPackage(
        module, root, found[:1], archive=path, reader=reader, prefix=prefix, scratch=scratch
    )


def _metadata(reader: _Reader) -> list[_Metadata]:
    """The metadata of a wheel, or of a source distribution; the one nearest to the top."""
    names = [n for n in reader.names if n.endswith((".dist-info/METADATA", "PKG-INFO"))]
    names.sort(key=lambda name: (name.count("/"), name))
    return [_Metadata(reader.read(name).decode(errors="replace")) for name in names[:1]]


class _Metadata(metadata.Distribution):
    """A distribution of which only the metadata is at hand."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


@dataclass(frozen=True)
class ArchivedPackage(Package):
    """A package whose files are read out of an archive when a probe asks for them.

    Attributes:
        archive: The file.
        reader: What is in it.
        prefix: The path in it of the folder that holds the package.
        scratch: Where the files are written to.
    """

    archive: Path = field(kw_only=True)
    reader: _Reader = field(kw_only=True)
    prefix: str = field(kw_only=True)
    scratch: Path = field(kw_only=True)

    @property
    def location(self) -> Path:
        return self.archive

    @cached_property
    def source(self) -> SourceTree:
        return _ArchivedTree(self)


class _ArchivedTree(SourceTree):
    def __init__(self, package: ArchivedPackage) -> None:
        super().__init__(package.scratch / package.module)
        self._package = package

    def find(self, name: str) -> Path | None:
        base = "/".join([self._package.module, *name.split(".")])
        for inside in (f"{base}/__init__.py", f"{base}.py"):
            if self._package.prefix + inside in self._package.reader.names:
                target = self._package.scratch / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(self._package.reader.read(self._package.prefix + inside))
                return target
        return None
