"""The KV-cache helpers' module, which vLLM 0.33 changed: no release tested here needs it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import speculators_vllm_compat
from cell import patched, unpatched
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree

_NAMES = (
    "_get_kv_cache_groups_uniform_spec",
    "get_kv_cache_config_from_groups",
    "unify_hybrid_kv_cache_specs",
)
_UTILS, _PLANNING = "v1/core/kv_cache_utils.py", "v1/core/kv_cache_planning.py"


def _definitions(*names: str) -> str:
    # unify_... is annotated, for a probe to tell that it gives nothing; tests ask where it is from.
    arrows = {name: " -> None" if name.startswith("unify") else "" for name in names}
    return "\n".join(
        f"def {name}(specs=None){arrow}:\n    return __name__\n" for name, arrow in arrows.items()
    )


_OLDER = {_UTILS: "import math\n" + _definitions(*_NAMES)}
_NEWER = {
    _UTILS: "def max_concurrency(): ...\n",
    # As in 0.33.0, it imports the module that the names have left.
    _PLANNING: "from vllm.v1.core.kv_cache_utils import max_concurrency\n" + _definitions(*_NAMES),
}
_GENERATOR = (
    f"from vllm.v1.core.kv_cache_utils import {', '.join(_NAMES)}\n"
    "class VllmHiddenStatesGenerator: ...\n"
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
    packages = {"__init__.py": "", "v1/__init__.py": "", "v1/core/__init__.py": ""}
    _write(folder / "vllm", {**packages, **files})
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
    from vllm.v1.core import kv_cache_utils

    functions = [getattr(kv_cache_utils, name) for name in _NAMES]
    assert {function.__module__ for function in functions} == {kv_cache_utils.__name__}
    finding = finding_of("kv_cache_location")
    assert finding.verdict is Verdict.NOT_NEEDED
    line = inspect.getsourcelines(functions[0])[1]
    assert finding.where == f"{kv_cache_utils.__file__}:{line}"


@pytest.mark.parametrize(
    ("files", "verdict", "where"),
    [
        (_OLDER, Verdict.NOT_NEEDED, f"{_UTILS}:2"),
        (_NEWER, Verdict.NEEDED, f"{_PLANNING}:2"),
        ({**_NEWER, **_OLDER}, Verdict.NOT_NEEDED, f"{_UTILS}:2"),
        (
            {_UTILS: _definitions(*_NAMES[:2]), _PLANNING: _definitions(_NAMES[2])},
            Verdict.NEEDED,
            f"{_PLANNING}:1",
        ),
    ],
    ids=["0.11.0 to 0.32.0", "0.33.0", "in both", "one of them moved"],
)
def test_probe_of_other_releases(tmp_path, patch_named, files, verdict, where):
    finding = patch_named("kv_cache_location").probe(_sources(tmp_path, files))
    assert finding.verdict is verdict
    assert finding.where == f"{tmp_path}/vllm/{where}"
    assert ("kv_cache_planning" in finding.found) is (verdict is Verdict.NEEDED)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("files", [_OLDER, _NEWER], ids=["0.32.0", "0.33.0"])
def test_one_of_them_gone(tmp_path, patch_named, files, name):
    renamed = {file: text.replace(f"def {name}", "def helper") for file, text in files.items()}
    finding = patch_named("kv_cache_location").probe(_sources(tmp_path, renamed))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}"
    assert finding.found == f"no {name}"
    assert name in finding.expected


def test_moved_elsewhere(tmp_path, patch_named):
    files = {"v1/core/kv_cache/planning.py": _NEWER[_PLANNING]}
    finding = patch_named("kv_cache_location").probe(_sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}"
    assert finding.found == "no such file"
    assert _NAMES[0] in finding.expected


def test_unpatched_the_newer_form_fails(tmp_path):
    """As both releases fail to be imported on vLLM 0.33.0."""
    script = """
        try:
            import speculators.data_generation.vllm_hidden_states_generator
        except ImportError as error:
            print(type(error).__name__, str(error).split(" (")[0])
    """
    expected = f"ImportError cannot import name '{_NAMES[0]}' from 'vllm.v1.core.kv_cache_utils'"
    assert _run(tmp_path, _NEWER, script) == expected


def test_applied_and_reverted_on_the_newer_form(tmp_path):
    script = f"""
        import vllm.v1.core.kv_cache_utils as utils
        from speculators_vllm_compat.patches.kv_cache_location import PATCH
        from speculators_vllm_compat.patching import Ledger

        before = dict(vars(utils))
        ledger = Ledger()
        PATCH.apply(utils, ledger)
        import vllm.v1.core.kv_cache_planning as planning
        for name in {_NAMES}:
            assert getattr(utils, name) is getattr(planning, name)
        import speculators.data_generation.vllm_hidden_states_generator as generator
        print(generator.unify_hybrid_kv_cache_specs())
        ledger.undo()
        assert dict(vars(utils)) == before
        assert not [name for name in {_NAMES} if hasattr(utils, name)]
        assert len([name for name in {_NAMES} if hasattr(planning, name)]) == 3
    """
    assert _run(tmp_path, _NEWER, script) == "vllm.v1.core.kv_cache_planning"


@pytest.mark.parametrize("kept", _NAMES)
def test_a_name_that_is_there_is_never_replaced(tmp_path, kept):
    files = {**_NEWER, _UTILS: _NEWER[_UTILS] + _definitions(kept)}
    script = f"""
        import vllm.v1.core.kv_cache_utils as utils
        from speculators_vllm_compat.patches.kv_cache_location import PATCH
        from speculators_vllm_compat.patching import Ledger

        before, ledger = utils.{kept}, Ledger()
        PATCH.apply(utils, ledger)
        assert utils.{kept} is before
        print(sorted(getattr(utils, name)() for name in {_NAMES}))
        ledger.undo()
        assert utils.{kept} is before
        assert [name for name in {_NAMES} if hasattr(utils, name)] == ["{kept}"]
    """
    homes = ["vllm.v1.core.kv_cache_planning"] * 2 + ["vllm.v1.core.kv_cache_utils"]
    assert _run(tmp_path, files, script) == str(homes)


@pytest.mark.parametrize(
    "first",
    ["", "import vllm.v1.core.kv_cache_utils", "import vllm.v1.core.kv_cache_planning"],
    ids=["nothing", "utils", "planning"],
)
def test_switched_on_before_speculators_is_imported(tmp_path, first):
    """The whole way: the names are there when speculators' import comes to need them."""
    script = f"""
        {first}
        import speculators_vllm_compat
        import speculators.data_generation.vllm_hidden_states_generator as generator
        import vllm.v1.core.kv_cache_utils as utils
        [state] = [p.state for p in speculators_vllm_compat.status().patches
                   if p.id == "kv_cache_location"]
        print(state, generator.unify_hybrid_kv_cache_specs())
        speculators_vllm_compat.revert()
        assert not [name for name in {_NAMES} if hasattr(utils, name)]
    """
    # Its other boundaries are not in this tree, which "warn" leaves at warnings.
    expected = "applied vllm.v1.core.kv_cache_planning"
    assert _run(tmp_path, _NEWER, script, mode="warn") == expected


def test_planning_imported_first_after_speculators(tmp_path):
    script = """
        import speculators_vllm_compat
        import speculators
        import vllm.v1.core.kv_cache_planning
        import speculators.data_generation.vllm_hidden_states_generator as generator
        print(generator.unify_hybrid_kv_cache_specs())
    """
    expected = "vllm.v1.core.kv_cache_planning"
    assert _run(tmp_path, _NEWER, script, mode="warn") == expected


def test_declined_on_the_older_form(tmp_path):
    script = """
        import speculators_vllm_compat, sys
        import speculators.data_generation.vllm_hidden_states_generator as generator
        [state] = [p.state for p in speculators_vllm_compat.status().patches
                   if p.id == "kv_cache_location"]
        assert "vllm.v1.core.kv_cache_planning" not in sys.modules
        print(state, generator.unify_hybrid_kv_cache_specs())
    """
    assert _run(tmp_path, _OLDER, script, mode="warn") == "- vllm.v1.core.kv_cache_utils"


def test_declined_in_this_environment():
    from vllm.v1.core import kv_cache_utils

    before = {name: getattr(kv_cache_utils, name) for name in _NAMES}
    with unpatched(), patched():
        assert {name: getattr(kv_cache_utils, name) for name in _NAMES} == before
    assert all(getattr(kv_cache_utils, name) is before[name] for name in _NAMES)


def test_applied_by_hand_in_this_environment_no_name_changes(monkeypatch, patch_named):
    from vllm.v1.core import kv_cache_utils

    # This vLLM has no such module; whatever it would hold, no name here is missing.
    monkeypatch.setitem(sys.modules, "vllm.v1.core.kv_cache_planning", object())
    before, ledger = dict(vars(kv_cache_utils)), Ledger()
    patch_named("kv_cache_location").apply(kv_cache_utils, ledger)
    assert all(getattr(kv_cache_utils, name) is before[name] for name in _NAMES)
    ledger.undo()
    assert dict(vars(kv_cache_utils)) == before
