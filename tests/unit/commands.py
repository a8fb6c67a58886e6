"""The command line in a process of its own, among fake packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fakes import distribution, write

GOOD_SPECULATORS = {
    "speculators/__init__.py": "raise SystemExit('imported')",
    "speculators/data_generation/__init__.py": "",
}


def command(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m speculators_vllm_compat`` where the fake packages are found first."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPECUL", "VLLM"))}
    return subprocess.run(
        [sys.executable, "-m", "speculators_vllm_compat", *arguments],
        env={**environment, "PYTHONPATH": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def installed(folder: Path, files: dict[str, str] | None = None, **versions: str) -> Path:
    """Fake packages that must not be imported, with metadata."""
    write(folder, {**GOOD_SPECULATORS, **(files or {})})
    for name, version in {"vllm": "0.29.0", "speculators": "0.3.0", **versions}.items():
        distribution(folder, name, version, [f"{name}/__init__.py"])
    return folder
