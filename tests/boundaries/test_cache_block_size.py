"""CacheConfig's block_size: from vLLM 0.18 one that is asked for restricts the backends."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from cell import assert_right, engine, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_RESTRICTS = not vllm_version().startswith("0.16.")
# CacheConfig's fields as the releases spell them.
_FORMS = {
    "0.11.0": "block_size: SkipValidation[BlockSize] = None",
    "0.17.0": "block_size: SkipValidation[BlockSize] = None",
    "0.18.0": "block_size: SkipValidation[int] = None\n"
    "    user_specified_block_size: bool = field(default=False, init=False)",
    "0.26.0": "block_size: int = Field(default=None, gt=0)\n"
    "    user_specified_block_size: bool = field(default=False, init=False)",
    "0.33.0": "DEFAULT_BLOCK_SIZE: ClassVar[int] = 16\n"
    "    block_size: int = Field(default=None, gt=0)\n"
    "    user_specified_block_size: bool = field(default=False, init=False)",
}


def _sources(folder: Path, fields: str, name: str = "CacheConfig") -> Sources:
    """A vLLM that consists of config/cache.py."""
    path = folder / "vllm" / "config" / "cache.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"@config\nclass {name}:\n    {fields}\n    swap_space: float = 4\n")
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def test_probe(finding_of):
    with unpatched() as module:
        names = {field.name for field in dataclasses.fields(module.CacheConfig)}
    assert ("user_specified_block_size" in names) is _RESTRICTS
    finding = finding_of("cache_block_size")
    assert finding.verdict is (Verdict.NEEDED if _RESTRICTS else Verdict.NOT_NEEDED)


@pytest.mark.parametrize("release", _FORMS)
def test_probe_of_other_releases(tmp_path, patch_named, release):
    finding = patch_named("cache_block_size").probe(_sources(tmp_path, _FORMS[release]))
    needed = tuple(map(int, release.split("."))) >= (0, 18, 0)
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where == f"{tmp_path}/vllm/config/cache.py:2"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ("kv_block_size: int = 16", "(kv_block_size=..., swap_space=...)"),
        ("block_size: int", "(block_size, swap_space=...)"),
        ("block_size: int = field(init=False)", "(swap_space=...)"),
    ],
)
def test_drifted_form(tmp_path, patch_named, fields, found):
    finding = patch_named("cache_block_size").probe(_sources(tmp_path, fields))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/config/cache.py:2"
    assert found in finding.found
    assert finding.expected == "an optional field block_size"


def test_moved_or_gone(tmp_path, patch_named):
    probe = patch_named("cache_block_size").probe
    gone = probe(_sources(tmp_path / "gone", _FORMS["0.33.0"], "KVCacheSettings"))
    assert gone.verdict is Verdict.UNKNOWN_FORM
    assert gone.where == f"{tmp_path}/gone/vllm/config/cache.py"
    assert gone.found == "no CacheConfig"
    moved = _sources(tmp_path / "moved", _FORMS["0.33.0"])
    (tmp_path / "moved/vllm/config/cache.py").unlink()
    finding = probe(moved)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/moved/vllm/config/cache.py"
    assert finding.found == "no such file"


@pytest.mark.skipif(not _RESTRICTS, reason="this vLLM does not tell who chose the size")
def test_unpatched_asks_for_the_size():
    with unpatched() as module:
        config = module.CacheConfig(block_size=module.VLLM_BLOCK_SIZE)
        assert config.user_specified_block_size is True


@pytest.mark.engine
@pytest.mark.skipif(not _RESTRICTS, reason="this vLLM's CPU backend takes 16")
def test_generator_fails_without_it():
    with (
        skipping("cache_block_size") as module,
        pytest.raises(RuntimeError, match="No common block size for 16"),
        engine(module),
    ):
        pass


@pytest.mark.engine
def test_patched_values_are_right():
    with patched() as module, engine(module) as generator:
        cache = generator.vllm_config.cache_config
        sizes = {
            group.kv_cache_spec.block_size
            for group in generator.scheduler.kv_cache_config.kv_cache_groups
        }
        # One group, so one size: the workers', the configuration's, the scheduler's.
        assert sizes == {cache.block_size} == {generator.scheduler.block_size}
        if _RESTRICTS:
            assert cache.user_specified_block_size is False
            assert cache.block_size % 32 == 0  # what the CPU backend takes from 0.29
        else:
            assert cache.block_size == module.VLLM_BLOCK_SIZE == 16
        size = cache.block_size
        prompts = [prompt(n, seed=n) for n in (size, size - 1, size + 1, 3 * size, 1)]
        assert_right(generator.generate(prompts), prompts)


@pytest.mark.skipif(not _RESTRICTS, reason="not needed where a size restricts nothing")
def test_only_speculators_size_is_left_out():
    with patched() as module:
        chosen = module.CacheConfig(block_size=module.VLLM_BLOCK_SIZE, gpu_memory_utilization=0.25)
        assert chosen.user_specified_block_size is False
        assert chosen.gpu_memory_utilization == 0.25
        asked = module.CacheConfig(block_size=64)  # as a subclass asks for a size of its own
        assert (asked.block_size, asked.user_specified_block_size) == (64, True)


@pytest.mark.engine
@pytest.mark.skipif(not _RESTRICTS, reason="not needed where a size restricts nothing")
def test_a_size_the_caller_asks_for_reaches_the_scheduler():
    prompts = [prompt(n, seed=n) for n in (64, 200)]
    with patched() as module:
        patched_config = module.CacheConfig
        # As people replace a name of the module.
        module.CacheConfig = lambda **kwargs: patched_config(**{**kwargs, "block_size": 64})
        try:
            with engine(module) as generator:
                assert generator.vllm_config.cache_config.block_size == 64
                assert generator.scheduler.block_size == 64
                assert_right(generator.generate(prompts), prompts)
        finally:
            module.CacheConfig = patched_config


@pytest.mark.skipif(_RESTRICTS, reason="needed where a size restricts the backends")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        before = module.CacheConfig
    with skipping("prefix_caching") as module:  # which wraps the same name
        assert module.CacheConfig is before
        assert module.CacheConfig(block_size=module.VLLM_BLOCK_SIZE).block_size == 16


def test_applied_by_hand_it_drops_one_size_only(patch_named):
    def config(**arguments: Any) -> dict[str, Any]:
        return arguments

    module, ledger = ModuleType(GENERATOR), Ledger()
    module.CacheConfig, module.VLLM_BLOCK_SIZE = config, 128  # speculators' size on an NPU
    patch_named("cache_block_size").apply(module, ledger)
    assert module.CacheConfig(block_size=128, swap_space=1) == {"swap_space": 1}
    assert module.CacheConfig(block_size=16) == {"block_size": 16}
    assert module.CacheConfig() == {}
    ledger.undo()
    assert module.CacheConfig is config
    assert module.VLLM_BLOCK_SIZE == 128


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before, size = module.CacheConfig, module.VLLM_BLOCK_SIZE
    with skipping("prefix_caching") as module:
        assert (module.CacheConfig is before) is not _RESTRICTS
        assert module.VLLM_BLOCK_SIZE is size
    assert module.CacheConfig is before
    with patched():
        pass
    assert module.CacheConfig is before
