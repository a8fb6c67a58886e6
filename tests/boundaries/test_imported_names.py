"""Names that speculators imports from vLLM: found wherever they are bound, missed when not."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
from sources import GENERATOR, WORKER, sources

from cell import unpatched
from speculators_vllm_compat.detect import detect
from speculators_vllm_compat.patches.imported_names import PATCH
from speculators_vllm_compat.patching import Verdict

_IMPORTS = "from vllm.api import Request\nfrom vllm.v1.core.kv_cache_utils import {}\n".format(
    "unify_hybrid_kv_cache_specs"
)


def test_nothing_is_missing_here(finding_of):
    assert finding_of("imported_names").verdict is Verdict.NOT_NEEDED


def test_what_it_looks_at_is_what_an_import_finds():
    """Every name it finds in the source is there in the imported module."""
    root = detect("speculators").root
    with unpatched():
        for name in ("vllm_hidden_states_generator", "custom_worker"):
            tree = ast.parse((root / "data_generation" / f"{name}.py").read_text())
            for node in tree.body:
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                    try:
                        module = importlib.import_module(node.module)
                    except ModuleNotFoundError:  # adapted: a boundary of its own
                        assert node.module == "vllm.utils.hashing"
                        continue
                    for alias in node.names:
                        adapted = "kv_cache" in node.module and "kv_cache" in alias.name
                        assert adapted or hasattr(module, alias.name)
    assert "vllm" in sys.modules


@pytest.mark.parametrize(
    "api",
    [
        "class Request: ...",
        "from .request import Request",
        "from .request import *",
        "try:\n    from .request import Request\nexcept ImportError:\n    Request = None",
        "def __getattr__(name): ...",
    ],
)
def test_bound(tmp_path, api):
    files = {
        GENERATOR: _IMPORTS,
        WORKER: "",
        "vllm/api.py": api,
        "vllm/request.py": "class Request: ...",
    }
    assert PATCH.probe(sources(tmp_path, files)).verdict is Verdict.NOT_NEEDED


@pytest.mark.parametrize(
    "api",
    [
        "",
        "class Requests: ...",
        "from .other import *",
        "if TYPE_CHECKING:\n    from .request import Request",
        "class Outer:\n    class Request: ...",
    ],
)
def test_not_bound(tmp_path, api):
    files = {GENERATOR: _IMPORTS, WORKER: "", "vllm/api.py": api, "vllm/other.py": ""}
    finding = PATCH.probe(sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.found.startswith("no Request in vllm.api, which ")
    assert f"{Path(GENERATOR).name}:1 imports" in finding.found
    assert (finding.where, finding.expected) == (f"{tmp_path}/vllm/api.py", "the name Request")


def test_no_such_module(tmp_path):
    files = {GENERATOR: "", WORKER: "from vllm.gone import thing\n"}
    finding = PATCH.probe(sources(tmp_path, files))
    assert finding.found.startswith("no thing in vllm.gone")
