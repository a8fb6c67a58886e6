"""The KV-cache layout, which vLLM wants settled before a cache is planned from 0.29."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sources import BESIDE

from cell import assert_right, engine, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_NEEDED = not vllm_version().startswith("0.16.")
_NOT_NEEDED = "this vLLM plans a cache without a layout"
_BACKENDS, _CACHE, _EXECUTOR = (
    "v1/attention/backends/utils.py",
    "config/cache.py",
    "v1/executor/abstract.py",
)
_GATE = "class CacheConfig:\n    def get_resolved_kv_cache_layout(self): ...\n"
_RESOLVE = (
    "import math\n\n"
    "def resolve_kv_cache_layout(vllm_config, supported_layouts, kv_cache_specs=None): ...\n"
)
_PUBLISH = (
    "class Executor:\n    def get_supported_kv_cache_layouts(self): ...\n"
    "    def set_kv_cache_layout(self, layout_name): ...\n"
)
_OLDER = {_CACHE: "class CacheConfig:\n    block_size: int = None\n"}
_0_29 = {_CACHE: _GATE, _BACKENDS: _RESOLVE, _EXECUTOR: _PUBLISH}
_0_33 = {
    **_0_29,
    _EXECUTOR: _PUBLISH.replace("layout_name", "layout_name, cp_kv_cache_interleave_size"),
}


def _sources(folder: Path, files: dict[str, str]) -> Sources:
    """A vLLM that consists of these files."""
    interface = {"v1/kv_cache_interface.py": BESIDE["vllm/v1/kv_cache_interface.py"]}
    for name, text in {**interface, **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def test_probe(finding_of):
    from vllm.config import CacheConfig
    from vllm.v1.attention.backends import utils

    assert hasattr(CacheConfig, "get_resolved_kv_cache_layout") is _NEEDED
    assert hasattr(utils, "resolve_kv_cache_layout") is _NEEDED
    finding = finding_of("kv_cache_layout")
    assert finding.verdict is (Verdict.NEEDED if _NEEDED else Verdict.NOT_NEEDED)
    decided = CacheConfig.get_resolved_kv_cache_layout if _NEEDED else CacheConfig
    path, line = finding.where.rsplit(":", 1)
    assert path == inspect.getsourcefile(CacheConfig)
    lines, first = inspect.getsourcelines(decided)
    assert first <= int(line) < first + len(lines)


@pytest.mark.parametrize(
    ("files", "verdict", "line"),
    [
        (_OLDER, Verdict.NOT_NEEDED, 1),
        ({**_OLDER, _BACKENDS: "def get_kv_cache_layout(): ...\n"}, Verdict.NOT_NEEDED, 1),
        (_0_29, Verdict.NEEDED, 2),
        (_0_33, Verdict.NEEDED, 2),
    ],
    ids=["0.11.0", "0.16.0", "0.29.0", "0.33.0"],
)
def test_probe_of_other_releases(tmp_path, patch_named, files, verdict, line):
    finding = patch_named("kv_cache_layout").probe(_sources(tmp_path, files))
    assert finding.verdict is verdict
    assert finding.where == f"{tmp_path}/vllm/{_CACHE}:{line}"


@pytest.mark.parametrize(
    ("file", "change", "line", "found", "expected"),
    [
        (_BACKENDS, ("supported_layouts", "layouts"), 3, "supported_layouts", "supported_layouts"),
        (_BACKENDS, ("=None)", "=None, world_size=1)"), 3, "world_size", "kv_cache_specs"),
        (_BACKENDS, ("=None)", "=None, *, world_size)"), 3, "requires world_size", "vllm_config"),
        (_BACKENDS, ("def resolve_kv", "def choose_kv"), None, "no resolve_kv_", "resolve_kv_"),
        (_BACKENDS, None, None, "no such file", "resolve_kv_cache_layout"),
        (_EXECUTOR, ("layout_name", "layout_name, rank"), 3, "rank", "cp_kv_cache_interleave_size"),
        (_EXECUTOR, ("def set_kv", "def publish_kv"), None, "set_kv_cache_layout", "set_kv_"),
        (_EXECUTOR, ("def get_supp", "def ask_supp"), None, "kv_cache_layout", "kv_cache_layout"),
        (_EXECUTOR, None, None, "no such file", "set_kv_cache_layout"),
        (_CACHE, None, None, "no such file", "CacheConfig"),
    ],
)
def test_drifted_form(tmp_path, patch_named, file, change, line, found, expected):
    files = {**_0_29, file: _0_29[file].replace(*change or ("", ""))}
    if change is None:
        del files[file]
    finding = patch_named("kv_cache_layout").probe(_sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{file}" + (f":{line}" if line else "")
    assert found in finding.found
    assert expected in finding.expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("self, layout_name", "self"),
        ("self, layout_name", "self, layout_name, *, cp_kv_cache_interleave_size"),
        ("get_supported_kv_cache_layouts(self)", "get_supported_kv_cache_layouts(self, ranks)"),
    ],
)
def test_drifted_form_of_the_executors_methods(tmp_path, patch_named, before, after):
    files = {**_0_29, _EXECUTOR: _PUBLISH.replace(before, after)}
    finding = patch_named("kv_cache_layout").probe(_sources(tmp_path, files))
    assert finding.verdict is Verdict.UNKNOWN_FORM


@pytest.mark.skipif(not _NEEDED, reason=_NOT_NEEDED)
def test_unpatched_fails():
    from vllm.config import CacheConfig

    with pytest.raises(ValueError, match="KV cache layout has not been resolved yet"):
        CacheConfig().get_resolved_kv_cache_layout()


@pytest.mark.engine
@pytest.mark.skipif(not _NEEDED, reason=_NOT_NEEDED)
def test_generator_fails_without_it():
    with (
        skipping("kv_cache_layout") as module,
        pytest.raises(ValueError, match="KV cache layout has not been resolved yet"),
        engine(module),
    ):
        pass


@pytest.mark.engine
def test_patched_values_are_right():
    prompts = [prompt(n, seed=n) for n in (280, 15)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)
        if not _NEEDED:
            assert not hasattr(generator.vllm_config.cache_config, "kv_cache_layout")
            return
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        layout = generator.vllm_config.cache_config.kv_cache_layout
        assert generator.scheduler.kv_cache_config.kv_cache_layout == layout
        executor = generator.executor
        [supported] = executor.collective_rpc("get_supported_kv_cache_layouts")
        assert layout in supported
        # Every worker has it, and vLLM's own choice from the same facts is the same.
        assert executor.collective_rpc(
            lambda worker: worker.vllm_config.cache_config.kv_cache_layout
        ) == [layout]
        generator.vllm_config.cache_config.kv_cache_layout = None
        [specs] = executor.collective_rpc("get_kv_cache_spec")
        chosen = resolve_kv_cache_layout(generator.vllm_config, [supported], specs.values())
        assert chosen.name == layout


class _Executor:
    """Two workers, which answer as vLLM's do; notes what it is asked for, in order."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.asked: list[Any] = []

    def collective_rpc(self, method: str) -> list[dict[str, str]]:
        self.asked.append(method)
        return [{"layers.0": "first"}, {"layers.1": "second", "layers.2": "third"}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        self.asked.append("get_supported_kv_cache_layouts")
        return [["LBHNC", "BLHNC"], ["BLHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.asked.append((layout_name,))


class _LaterExecutor(_Executor):
    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int) -> None:
        self.asked.append((layout_name, cp_kv_cache_interleave_size))


@pytest.mark.parametrize(
    ("executor", "published"),
    [(_Executor, ("BLHNC",)), (_LaterExecutor, ("BLHNC", 4))],
    ids=["0.29.0", "0.33.0"],
)
@pytest.mark.parametrize("by_keyword", [True, False])
def test_applied_by_hand_it_asks_as_enginecore_does(
    monkeypatch, patch_named, executor, published, by_keyword
):
    from vllm.v1.attention.backends import utils

    resolved = []

    def resolve(vllm_config, supported_layouts, kv_cache_specs):
        resolved.append((vllm_config, supported_layouts, list(kv_cache_specs)))
        vllm_config.cache_config.kv_cache_layout = "BLHNC"
        return SimpleNamespace(name="BLHNC")

    def plan(vllm_config):
        return SimpleNamespace(planned_for=vllm_config)

    monkeypatch.setattr(utils, "resolve_kv_cache_layout", resolve, raising=False)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=None),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=4),
    )
    module, ledger = ModuleType(GENERATOR), Ledger()
    module.MultiprocExecutor, module.get_kv_cache_config_from_groups = executor, plan
    patch_named("kv_cache_layout").apply(module, ledger)
    args, kwargs = ((), {"vllm_config": config}) if by_keyword else ((config,), {})
    made = module.MultiprocExecutor(*args, **kwargs)
    assert isinstance(made, executor)
    assert made.asked == ["get_kv_cache_spec", "get_supported_kv_cache_layouts", published]
    assert resolved == [(config, [["LBHNC", "BLHNC"], ["BLHNC"]], ["first", "second", "third"])]
    planned = module.get_kv_cache_config_from_groups(*args, **kwargs)
    assert planned.planned_for is config
    assert planned.kv_cache_layout == "BLHNC"
    ledger.undo()
    assert module.MultiprocExecutor is executor
    assert module.get_kv_cache_config_from_groups is plan


def test_revert_restores_the_identical_objects():
    """Where it is not needed, neither name is touched."""
    with unpatched() as module:
        before = module.MultiprocExecutor, module.get_kv_cache_config_from_groups
    with skipping("worker_plugin", "kv_cache_arguments") as module:  # which wrap the same names
        assert (module.MultiprocExecutor is before[0]) is not _NEEDED
        assert (module.get_kv_cache_config_from_groups is before[1]) is not _NEEDED
    assert (module.MultiprocExecutor, module.get_kv_cache_config_from_groups) == before
    with patched():
        pass
    assert module.MultiprocExecutor is before[0]
    assert module.get_kv_cache_config_from_groups is before[1]
