"""CacheConfig's enable_prefix_caching, on by default from vLLM 0.12."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_SILENT = "CacheConfig(block_size=16, gpu_memory_utilization=0.8)"  # 0.3.0
_EXPLICIT = "CacheConfig(block_size=16, enable_prefix_caching=False)"  # 0.4
# CacheConfig's field as the releases spell it.
_FORMS = {
    "0.11.0": "enable_prefix_caching: Optional[bool] = None",
    "0.11.2": "enable_prefix_caching: bool | None = None",
    "0.12.0": "enable_prefix_caching: bool = True",
    "0.33.0": "enable_prefix_caching: bool = True",
}


def _sources(folder: Path, field: str, call: str, name: str = "CacheConfig") -> Sources:
    """A vLLM and a speculators that consist of this field and this call."""
    files = {
        "vllm/config/cache.py": (
            f"@config\nclass {name}:\n    gpu_memory_utilization: float = 1\n    {field}\n"
        ),
        "speculators/data_generation/vllm_hidden_states_generator.py": f"cache_config = {call}\n",
    }
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def _switch_on(config) -> None:
    config.cache_config.enable_prefix_caching = True


def test_probe(finding_of):
    with unpatched() as module:
        assert module.CacheConfig().enable_prefix_caching is True
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("prefix_caching").verdict is expected


@pytest.mark.parametrize("release", _FORMS)
@pytest.mark.parametrize("call", [_SILENT, _EXPLICIT])
def test_probe_of_other_releases(tmp_path, patch_named, release, call):
    finding = patch_named("prefix_caching").probe(_sources(tmp_path, _FORMS[release], call))
    needed = call == _SILENT and release in {"0.12.0", "0.33.0"}
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where == f"{tmp_path}/vllm/config/cache.py:2"


@pytest.mark.parametrize("call", [_SILENT, _EXPLICIT])
@pytest.mark.parametrize(
    "field",
    [
        "enable_prefix_caching: bool = Field(default=True)",
        "enable_prefix_caching: bool = current_platform.caches_prefixes",
        "enable_prefix_caching: bool",
        "prefix_caching: bool = True",
    ],
)
def test_drifted_form(tmp_path, patch_named, field, call):
    finding = patch_named("prefix_caching").probe(_sources(tmp_path, field, call))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/config/cache.py:2"
    assert "enable_prefix_caching" in finding.found
    assert finding.expected == "True, None or False"


@pytest.mark.parametrize("field", ["enable_prefix_caching: bool", "prefix_caching: bool = True"])
def test_a_missing_default_is_not_called_none(tmp_path, patch_named, field):
    finding = patch_named("prefix_caching").probe(_sources(tmp_path, field, _SILENT))
    assert "defaults to None" not in finding.found


def test_moved_or_gone(tmp_path, patch_named):
    probe = patch_named("prefix_caching").probe
    gone = probe(_sources(tmp_path / "gone", _FORMS["0.33.0"], _SILENT, "KVCacheSettings"))
    assert gone.verdict is Verdict.UNKNOWN_FORM
    assert gone.where == f"{tmp_path}/gone/vllm/config/cache.py"
    assert gone.found == "no CacheConfig"
    moved = _sources(tmp_path / "moved", _FORMS["0.33.0"], _SILENT)
    (tmp_path / "moved/vllm/config/cache.py").unlink()
    finding = probe(moved)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert (finding.where, finding.found) == (
        f"{tmp_path}/moved/vllm/config/cache.py",
        "no such file",
    )


@pytest.mark.engine
def test_tokens_are_missing_without_it():
    """With caching on, a repeated prompt is taken from the cache: that is told, not returned."""
    repeated = [prompt(300, seed=1)] * 2
    configure = None if is_0_3() else _switch_on
    with skipping("prefix_caching") as module, engine(module, configure=configure) as generator:
        assert generator.vllm_config.cache_config.enable_prefix_caching is True
        with pytest.raises(RuntimeError, match=r"req_0_1: \d+ of 300 tokens were never computed"):
            generator.generate(repeated)
        assert not generator.scheduler.requests


@pytest.mark.engine
def test_patched_values_are_right():
    prefix = prompt(260, seed=2)  # longer than two of any release's blocks
    repeated = [prompt(300, seed=1)] * 2
    shared = [prefix + prompt(n, seed=10 + n) for n in (1, 40, 300)]
    again = [prefix + prompt(n, seed=20 + n) for n in (30, 7)] + [prefix, repeated[0], shared[0]]
    with patched() as module, engine(module) as generator:
        assert generator.vllm_config.cache_config.enable_prefix_caching is False
        assert not generator.scheduler.kv_cache_manager.enable_caching
        for prompts in (repeated, repeated, shared, again):
            assert_right(generator.generate(prompts), prompts)


@pytest.mark.skipif(not is_0_3(), reason="0.4 sets enable_prefix_caching itself")
def test_only_the_default_changes():
    with patched() as module:
        assert module.CacheConfig().enable_prefix_caching is False
        assert module.CacheConfig(enable_prefix_caching=True).enable_prefix_caching is True
        assert module.CacheConfig(gpu_memory_utilization=0.25).gpu_memory_utilization == 0.25


@pytest.mark.skipif(is_0_3(), reason="needed for 0.3.0")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        before = module.CacheConfig
    with skipping("cache_block_size") as module:  # which wraps the same name
        assert module.CacheConfig is before


def test_applied_by_hand_it_keeps_what_is_said(patch_named):
    module, ledger = ModuleType(GENERATOR), Ledger()
    module.CacheConfig = dict
    patch_named("prefix_caching").apply(module, ledger)
    said = {"block_size": 16, "enable_prefix_caching": False}
    assert module.CacheConfig(**said) == said
    assert module.CacheConfig(enable_prefix_caching=True) == {"enable_prefix_caching": True}
    assert module.CacheConfig() == {"enable_prefix_caching": False}
    ledger.undo()
    assert module.CacheConfig is dict


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.CacheConfig
    with skipping("cache_block_size") as module:
        assert (module.CacheConfig is before) is not is_0_3()
    assert module.CacheConfig is before
    with patched():
        pass
    assert module.CacheConfig is before
