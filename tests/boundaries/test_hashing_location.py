"""get_hash_fn_by_name's module, which vLLM 0.11.1 split off: no release tested here needs it."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

import speculators_vllm_compat
from cell import patched, unpatched
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree

_FUNCTION = "import math\n\n\ndef get_hash_fn_by_name(hash_fn_name):\n    return hash_fn_name\n"
_OLDER = {"utils/__init__.py": _FUNCTION}
_NEWER = {"utils/__init__.py": "", "utils/hashing.py": _FUNCTION}
_BOTH = {"utils/__init__.py": _FUNCTION, "utils/hashing.py": _FUNCTION}
_HASHING = "vllm.utils.hashing"
# As 0.4 imports it, with what else its module must define for the patches to look at.
_GENERATOR = (
    "from vllm.utils.hashing import get_hash_fn_by_name\nclass VllmHiddenStatesGenerator: ...\n"
)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _sources(folder: Path, files: dict[str, str]) -> Sources:
    """A vLLM that consists of these files."""
    _write(folder / "vllm", files)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def _run(folder: Path, files: dict[str, str], script: str, mode: str = "off") -> str:
    """What a script prints in a process whose vllm and speculators consist of these files."""
    _write(folder / "vllm", {"__init__.py": "__version__ = '0.11.0'\n", **files})
    package = {"__init__.py": "", "data_generation/__init__.py": ""}
    module = {"data_generation/vllm_hidden_states_generator.py": _GENERATOR}
    _write(folder / "speculators", {**package, **module})
    ours = Path(speculators_vllm_compat.__file__).parents[1]
    path = os.pathsep.join([str(folder), str(ours)])
    environment = {**os.environ, "PYTHONPATH": path, "SPECULATORS_VLLM_COMPAT": mode}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_probe(finding_of):
    from vllm.utils.hashing import get_hash_fn_by_name

    finding = finding_of("hashing_location")
    assert finding.verdict is Verdict.NOT_NEEDED
    line = inspect.getsourcelines(get_hash_fn_by_name)[1]
    assert finding.where == f"{inspect.getsourcefile(get_hash_fn_by_name)}:{line}"


@pytest.mark.parametrize(
    ("files", "verdict", "where"),
    [
        (_OLDER, Verdict.NEEDED, "utils/__init__.py:4"),
        ({"utils.py": _FUNCTION}, Verdict.NEEDED, "utils.py:4"),
        (_NEWER, Verdict.NOT_NEEDED, "utils/hashing.py:4"),
        (_BOTH, Verdict.NOT_NEEDED, "utils/hashing.py:4"),
    ],
    ids=["0.11.0", "0.11.0 as one file", "0.11.1 to 0.33.0", "in both"],
)
def test_probe_of_other_releases(tmp_path, patch_named, files, verdict, where):
    finding = patch_named("hashing_location").probe(_sources(tmp_path, files))
    assert finding.verdict is verdict
    assert finding.where == f"{tmp_path}/vllm/{where}"


@pytest.mark.parametrize("home", ["utils/__init__.py", "utils/hashing.py"])
def test_drifted_form(tmp_path, patch_named, home):
    files = {home: _FUNCTION.replace("hash_fn_name)", "hash_fn_name, seed)")}
    finding = patch_named("hashing_location").probe(_sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{home}:4"
    assert "requires seed" in finding.found
    assert finding.expected == "(name of the hash function)"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"utils/hashing.py": _FUNCTION.replace("_by_name", "")}, "no get_hash_fn_by_name"),
        ({"utils/digests.py": _FUNCTION}, "no such file"),
    ],
)
def test_moved_or_gone(tmp_path, patch_named, files, found):
    finding = patch_named("hashing_location").probe(_sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/utils/hashing.py"
    assert finding.found == found
    assert "get_hash_fn_by_name" in finding.expected


def test_unpatched_the_older_form_fails(tmp_path):
    """As 0.4 fails to be imported on vLLM 0.11.0."""
    script = """
        try:
            import speculators.data_generation.vllm_hidden_states_generator
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert _run(tmp_path, _OLDER, script) == _HASHING


def test_applied_and_reverted_on_the_older_form(tmp_path):
    script = """
        import importlib, sys
        import vllm.utils
        from speculators_vllm_compat.patches.hashing_location import PATCH
        from speculators_vllm_compat.patching import Ledger

        before = dict(vars(vllm.utils))
        ledger = Ledger()
        PATCH.apply(vllm.utils, ledger)
        from vllm.utils.hashing import get_hash_fn_by_name
        assert get_hash_fn_by_name is vllm.utils.get_hash_fn_by_name
        assert importlib.import_module("vllm.utils.hashing") is vllm.utils.hashing
        import speculators.data_generation.vllm_hidden_states_generator as generator
        assert generator.get_hash_fn_by_name is get_hash_fn_by_name
        ledger.undo()
        assert vars(vllm.utils) == before
        assert vllm.utils.get_hash_fn_by_name is get_hash_fn_by_name
        assert "vllm.utils.hashing" not in sys.modules
        try:
            import vllm.utils.hashing
        except ModuleNotFoundError as error:
            print(error.name)
    """
    assert _run(tmp_path, _OLDER, script) == _HASHING


@pytest.mark.parametrize("first", ["", "import vllm.utils"], ids=["later", "imported already"])
def test_switched_on_before_speculators_is_imported(tmp_path, first):
    """The whole way: the alias is there when speculators' import comes to need it."""
    script = f"""
        {first}
        import speculators_vllm_compat, sys
        import speculators.data_generation.vllm_hidden_states_generator as generator
        import vllm.utils
        assert generator.get_hash_fn_by_name is vllm.utils.get_hash_fn_by_name
        [state] = [p.state for p in speculators_vllm_compat.status().patches
                   if p.id == "hashing_location"]
        speculators_vllm_compat.revert()
        assert "vllm.utils.hashing" not in sys.modules
        assert not hasattr(vllm.utils, "hashing")
        print(state)
    """
    # Its other boundaries are not in this tree, which "warn" leaves at warnings.
    assert _run(tmp_path, _OLDER, script, mode="warn") == "applied"


def test_declined_on_the_newer_form(tmp_path):
    script = """
        import speculators_vllm_compat
        import speculators.data_generation.vllm_hidden_states_generator as generator
        import vllm.utils.hashing
        assert vllm.utils.hashing.__file__.endswith("hashing.py")
        assert generator.get_hash_fn_by_name is vllm.utils.hashing.get_hash_fn_by_name
        [state] = [p.state for p in speculators_vllm_compat.status().patches
                   if p.id == "hashing_location"]
        print(state)
    """
    assert _run(tmp_path, _NEWER, script, mode="warn") == "-"


def test_a_module_that_is_there_is_never_replaced(patch_named):
    import vllm.utils

    hashing = importlib.import_module(_HASHING)
    vllm.utils.get_hash_fn_by_name = hashing.get_hash_fn_by_name  # as where both have it
    ledger = Ledger()
    try:
        patch_named("hashing_location").apply(vllm.utils, ledger)
    finally:
        del vllm.utils.get_hash_fn_by_name
    assert len(ledger) == 0
    assert sys.modules[_HASHING] is hashing is vllm.utils.hashing


def test_an_attribute_that_is_there_is_never_replaced(monkeypatch, patch_named):
    hashing = importlib.import_module(_HASHING)
    monkeypatch.delitem(sys.modules, _HASHING)
    utils, ledger = ModuleType("vllm.utils"), Ledger()
    utils.get_hash_fn_by_name, utils.hashing = hashing.get_hash_fn_by_name, "of somebody else"
    with pytest.raises(AttributeError, match="only a missing name is added"):
        patch_named("hashing_location").apply(utils, ledger)
    ledger.undo()  # what the activation does when a patch raises
    assert _HASHING not in sys.modules
    assert utils.hashing == "of somebody else"


def test_declined_in_this_environment():
    import vllm.utils

    hashing = importlib.import_module(_HASHING)
    with unpatched(), patched():
        assert sys.modules[_HASHING] is hashing
        assert vllm.utils.hashing is hashing
    assert sys.modules[_HASHING] is hashing
    assert vllm.utils.hashing is hashing
