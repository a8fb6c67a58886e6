"""get_kv_cache_config_from_groups' kv_cache_specs, which vLLM 0.12 removed."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_NAME = "get_kv_cache_config_from_groups"
_OMITS = f"{_NAME}(vllm_config=a, kv_cache_groups=b, available_memory=c)"  # 0.4
_PASSES = _OMITS.replace("=c)", "=c, kv_cache_specs=d)")  # 0.3.0
_UTILS, _PLANNING = "v1/core/kv_cache_utils.py", "v1/core/kv_cache_planning.py"
# Where the releases have it, and what it takes there.
_FORMS = {
    "0.11.0": (_UTILS, "vllm_config, kv_cache_groups, kv_cache_specs, available_memory"),
    "0.11.2": (_UTILS, "vllm_config, kv_cache_groups, kv_cache_specs, available_memory"),
    "0.12.0": (_UTILS, "vllm_config, kv_cache_groups, available_memory"),
    "0.20.0": (_UTILS, "vllm_config, kv_cache_groups, available_memory, suppress_log=False"),
    "0.32.0": (_UTILS, "vllm_config, kv_cache_groups, available_memory"),
    "0.33.0": (_PLANNING, "vllm_config, kv_cache_groups, available_memory"),
}


def _sources(folder: Path, form: tuple[str, str], call: str, name: str = _NAME) -> Sources:
    """A vLLM and a speculators that consist of this function and this call."""
    files = {
        f"vllm/{form[0]}": f"import copy\n\n\ndef {name}({form[1]}):\n    ...\n",
        "speculators/data_generation/vllm_hidden_states_generator.py": f"config = {call}\n",
    }
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def test_probe(finding_of):
    with unpatched() as module:
        function = getattr(module, _NAME)
    assert list(inspect.signature(function).parameters) == [
        "vllm_config",
        "kv_cache_groups",
        "available_memory",
    ]
    finding = finding_of("kv_cache_arguments")
    assert finding.verdict is (Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED)
    line = inspect.getsourcelines(function)[1]
    assert finding.where == f"{inspect.getsourcefile(function)}:{line}"


@pytest.mark.parametrize("call", [_PASSES, _OMITS])
@pytest.mark.parametrize("release", _FORMS)
def test_probe_of_other_releases(tmp_path, patch_named, release, call):
    finding = patch_named("kv_cache_arguments").probe(_sources(tmp_path, _FORMS[release], call))
    older = release.startswith("0.11.")
    needed = older is (call == _OMITS)
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where == f"{tmp_path}/vllm/{_FORMS[release][0]}:4"


@pytest.mark.parametrize("call", [_PASSES, _OMITS])
@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        ("vllm_config, kv_cache_groups, available_bytes", "takes no available_memory"),
        ("vllm_config, groups, available_memory", "takes no kv_cache_groups"),
        ("vllm_config, kv_cache_groups, available_memory, *, layout", "requires layout"),
        ("vllm_config, kv_cache_groups, specs, available_memory", "requires specs"),
    ],
)
def test_drifted_form(tmp_path, patch_named, parameters, found, call):
    sources = _sources(tmp_path, (_UTILS, parameters), call)
    finding = patch_named("kv_cache_arguments").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}:4"
    assert found in finding.found
    assert "'available_memory'" in finding.expected
    assert "with or without kv_cache_specs" in finding.expected


def test_moved_or_gone(tmp_path, patch_named):
    probe = patch_named("kv_cache_arguments").probe
    gone = probe(_sources(tmp_path / "gone", _FORMS["0.32.0"], _OMITS, "plan_kv_cache"))
    assert gone.verdict is Verdict.UNKNOWN_FORM
    assert gone.where == f"{tmp_path}/gone/vllm/{_UTILS}"
    assert gone.found == f"no {_NAME}"
    form = ("v1/core/kv_cache_elsewhere.py", _FORMS["0.32.0"][1])
    moved = probe(_sources(tmp_path / "moved", form, _OMITS))
    assert moved.verdict is Verdict.UNKNOWN_FORM
    assert moved.where == f"{tmp_path}/moved/vllm/{_UTILS}"
    assert moved.found == "no such file"
    assert _NAME in moved.expected


def test_unpatched_fails():
    """Both releases of vLLM refuse what 0.3.0 passes; 0.4 passes what they take."""
    arguments = {"vllm_config": None, "kv_cache_groups": [], "available_memory": 1}
    with unpatched() as module, pytest.raises(TypeError, match="kv_cache_specs"):
        module.get_kv_cache_config_from_groups(**arguments, kv_cache_specs={})


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 does not pass kv_cache_specs")
def test_generator_fails_without_it():
    with (
        skipping("kv_cache_arguments") as module,
        pytest.raises(TypeError, match="unexpected keyword argument 'kv_cache_specs'"),
        engine(module),
    ):
        pass


@pytest.mark.engine
def test_patched_values_are_right(monkeypatch):
    given = []
    with unpatched() as module:
        original = module.get_kv_cache_config_from_groups

    def recorded(vllm_config, kv_cache_groups, available_memory):
        given.append((kv_cache_groups, available_memory))
        return original(vllm_config, kv_cache_groups, available_memory)

    monkeypatch.setattr(module, _NAME, recorded)
    prompts = [prompt(n, seed=n) for n in (300, 8)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)
        config = generator.scheduler.kv_cache_config
    assert module.get_kv_cache_config_from_groups is recorded
    [(groups, memory)] = given
    assert groups == config.kv_cache_groups
    assert sorted(groups[0].layer_names) == [f"model.layers.{i}.self_attn.attn" for i in range(6)]
    layers, page = len(groups[0].layer_names), groups[0].kv_cache_spec.page_size_bytes
    assert config.num_blocks == memory // (layers * page)


def test_applied_by_hand_to_older_and_newer_forms(patch_named):
    def older(vllm_config, kv_cache_groups, kv_cache_specs, available_memory):
        return vllm_config, kv_cache_groups, kv_cache_specs, available_memory

    def newer(vllm_config, kv_cache_groups, available_memory):
        return vllm_config, kv_cache_groups, available_memory

    groups = [
        SimpleNamespace(layer_names=["layers.0", "layers.2"], kv_cache_spec="full"),
        SimpleNamespace(layer_names=["layers.1"], kv_cache_spec="sliding"),
    ]
    filled = {"layers.0": "full", "layers.1": "sliding", "layers.2": "full"}
    said = {"layers.0": "said"}
    call: dict[str, Any] = {
        "vllm_config": "config",
        "kv_cache_groups": groups,
        "available_memory": 7,
    }
    for form, more, expected in (
        (older, {}, ("config", groups, filled, 7)),
        (older, {"kv_cache_specs": said}, ("config", groups, said, 7)),
        (newer, {}, ("config", groups, 7)),
        (newer, {"kv_cache_specs": said}, ("config", groups, 7)),
    ):
        module, ledger = ModuleType(GENERATOR), Ledger()
        module.get_kv_cache_config_from_groups = form
        patch_named("kv_cache_arguments").apply(module, ledger)
        assert module.get_kv_cache_config_from_groups(**call, **more) == expected
        ledger.undo()
        assert module.get_kv_cache_config_from_groups is form


@pytest.mark.skipif(is_0_3(), reason="needed for 0.3.0")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        before = module.get_kv_cache_config_from_groups
    with skipping("kv_cache_layout") as module:  # which wraps the same name
        assert module.get_kv_cache_config_from_groups is before


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.get_kv_cache_config_from_groups
    with skipping("kv_cache_layout") as module:
        assert (module.get_kv_cache_config_from_groups is before) is not is_0_3()
    assert module.get_kv_cache_config_from_groups is before
    with patched():
        pass
    assert module.get_kv_cache_config_from_groups is before
