"""Small packages written to a folder, in place of vLLM, speculators and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

GENERATOR = """
import vllm.api
from vllm.api import Request, Scheduler

class VllmHiddenStatesGenerator:
    def generate(self, token_ids):
        return Request(eos_token_id=2)
"""

FILES = {
    "vllm/__init__.py": "__version__ = '1.2.3'",
    "vllm/api.py": "class Request: ...\nclass Scheduler: ...\n",
    "transformers/__init__.py": "",
    "transformers/configuration_utils.py": "class PretrainedConfig:\n    size: int = 0\n",
    "speculators/__init__.py": "import transformers.configuration_utils",
    "speculators/data_generation/__init__.py": (
        "from .vllm_hidden_states_generator import VllmHiddenStatesGenerator"
    ),
    "speculators/data_generation/vllm_hidden_states_generator.py": GENERATOR,
    "speculators/data_generation/custom_worker.py": "class HiddenStatesWorkerExtension: ...\n",
}

# Two patches on the generator's module and one on the worker's, with probes that read a file.
PRELUDE = """
import importlib, logging, os, sys, threading
import speculators_vllm_compat as compat
from speculators_vllm_compat import activation, plan
from speculators_vllm_compat.patching import (
    CUSTOM_WORKER, GENERATOR, Finding, Patch, Verdict,
)
from speculators_vllm_compat.probing import needed, not_needed, unknown

FAIL = set()

def probe(sources):
    text = sources.vllm.module("api").text
    if "# drifted" in text:
        return unknown("class Request(*args)", "vllm/api.py:1", "class Request")
    return needed("class Request", "vllm/api.py:1")

def wrap(name):
    def apply(module, ledger):
        ledger.wrap(module, name, lambda wrapped, instance, args, kwargs: (name, "patched"))
        if name in FAIL:
            raise LookupError("injected")
    return apply

def patch(patch_id, target, name, **more):
    return Patch(
        id=patch_id, summary="s", why="w", upstream="u", process="driver", removable="r",
        target=target, apply=wrap(name), **{"probe": probe, **more},
    )

plan.PATCHES = (
    patch("request", GENERATOR, "Request"),
    patch("scheduler", GENERATOR, "Scheduler"),
    patch("extension", CUSTOM_WORKER, "HiddenStatesWorkerExtension"),
    patch("spare", GENERATOR, "Missing", probe=lambda sources: not_needed("fine", "x.py:1")),
)

def load():
    return importlib.import_module(GENERATOR)

def load_worker():
    return importlib.import_module(CUSTOM_WORKER)

def residue():
    '''What a failure must not leave behind.'''
    return (
        activation._activation._hooks in sys.meta_path,
        "_SPECULATORS_VLLM_COMPAT_DRIVER" in os.environ,
        len(activation._activation._ledger or ()),
    )
"""


def write(folder: Path, files: dict[str, str] | None = None) -> Path:
    """Write the fake packages, with some files replaced."""
    for name, text in {**FILES, **(files or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def distribution(
    folder: Path, name: str, version: str, files: list[str], direct_url: str | None = None
) -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if direct_url is not None:
        (info / "direct_url.json").write_text(direct_url)


def run(folder: Path, code: str, *, prelude: bool = True, **variables: str) -> str:
    """Run code in a process of its own that finds the fake packages; returns what it printed.

    Raises:
        AssertionError: It failed; the message holds its errors.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATORS_VLLM")}
    ended = subprocess.run(
        [sys.executable, "-c", (PRELUDE if prelude else "") + textwrap.dedent(code)],
        env={**environment, "PYTHONPATH": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
