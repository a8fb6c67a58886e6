"""Scheduler's block_size: required from vLLM 0.11.1, and the workers' choice from 0.18."""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sources import BESIDE

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_CHOSEN_BY_VLLM = not vllm_version().startswith("0.16.")
_NEEDED = is_0_3() or _CHOSEN_BY_VLLM
_OMITS = "Scheduler(vllm_config=a, kv_cache_config=b, structured_output_manager=c)"  # 0.3.0
_PASSES = _OMITS.replace("=c)", "=c, block_size=VLLM_BLOCK_SIZE)")  # 0.4
_FIRST = "self, vllm_config, kv_cache_config, structured_output_manager"
_LAST = "mm_registry=REGISTRY, include_finished_set=False, log_stats=False"
# Scheduler.__init__ as the releases spell it, and whether CacheConfig tells who chose the size.
_FORMS = {
    "0.11.0": (f"{_FIRST}, {_LAST}", False),
    "0.11.1": (f"{_FIRST}, block_size, {_LAST}", False),
    "0.17.0": (f"{_FIRST}, block_size, {_LAST}", False),
    "0.18.0": (f"{_FIRST}, block_size, {_LAST}", True),
    "0.20.0": (f"{_FIRST}, block_size, hash_block_size=None, {_LAST}", True),
    "0.33.0": (f"{_FIRST}, block_size, hash_block_size=None, {_LAST}", True),
}
# The releases that need it, by what speculators calls.
_NEEDS = {
    _OMITS: {"0.11.1", "0.17.0", "0.18.0", "0.20.0", "0.33.0"},
    _PASSES: {"0.11.0", "0.18.0", "0.20.0", "0.33.0"},
}


def _sources(folder: Path, parameters: str, tells: bool, call: str, **names: str) -> Sources:
    """A vLLM and a speculators that consist of this class and this call."""
    tell = "user_specified_block_size: bool = field(default=False, init=False)" if tells else ""
    name = names.get("name", "Scheduler")
    files = {
        "vllm/v1/core/sched/scheduler.py": f"class {name}:\n    def __init__({parameters}): ...\n",
        "vllm/config/cache.py": f"class CacheConfig:\n    block_size: int = None\n    {tell}\n",
        "vllm/v1/kv_cache_interface.py": BESIDE["vllm/v1/kv_cache_interface.py"],
        "vllm/v1/core/kv_cache_utils.py": (
            "def resolve_kv_cache_block_sizes(kv_cache_config, vllm_config): ...\n"
        ),
        "speculators/data_generation/vllm_hidden_states_generator.py": f"scheduler = {call}\n",
    }
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def test_probe(finding_of):
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.scheduler import Scheduler

    parameters = inspect.signature(Scheduler.__init__).parameters
    assert parameters["block_size"].default is inspect.Parameter.empty
    assert ("hash_block_size" in parameters) is _CHOSEN_BY_VLLM
    assert hasattr(CacheConfig(), "user_specified_block_size") is _CHOSEN_BY_VLLM
    finding = finding_of("scheduler_init")
    assert finding.verdict is (Verdict.NEEDED if _NEEDED else Verdict.NOT_NEEDED)
    line = inspect.getsourcelines(Scheduler.__init__)[1]
    assert finding.where == f"{inspect.getsourcefile(Scheduler)}:{line}"


@pytest.mark.parametrize("call", [_OMITS, _PASSES])
@pytest.mark.parametrize("release", _FORMS)
def test_probe_of_other_releases(tmp_path, patch_named, release, call):
    finding = patch_named("scheduler_init").probe(_sources(tmp_path, *_FORMS[release], call))
    needed = release in _NEEDS[call]
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where == f"{tmp_path}/vllm/v1/core/sched/scheduler.py:2"


@pytest.mark.parametrize("call", [_OMITS, _PASSES])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("block_size,", "scheduler_block_size,"), "requires scheduler_block_size"),
        (("hash_block_size=None", "hash_block_size"), "requires hash_block_size"),
        (("kv_cache_config", "kv_config"), "takes no kv_cache_config"),
        (("structured_output_manager", "grammar"), "takes no structured_output_manager"),
    ],
)
def test_drifted_form(tmp_path, patch_named, change, found, call):
    # Keyword-only, so that a required one may follow an optional one.
    parameters = _FORMS["0.33.0"][0].replace(*change).replace("self, ", "self, *, ")
    finding = patch_named("scheduler_init").probe(_sources(tmp_path, parameters, True, call))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/v1/core/sched/scheduler.py:2"
    assert found in finding.found
    assert "with or without block_size" in finding.expected


def test_moved_or_gone(tmp_path, patch_named):
    probe = patch_named("scheduler_init").probe
    parameters, tells = _FORMS["0.33.0"]
    gone = probe(_sources(tmp_path / "gone", parameters, tells, _PASSES, name="SyncScheduler"))
    assert gone.verdict is Verdict.UNKNOWN_FORM
    assert gone.where == f"{tmp_path}/gone/vllm/v1/core/sched/scheduler.py"
    assert gone.found == "no Scheduler.__init__"
    moved = _sources(tmp_path / "moved", parameters, tells, _PASSES)
    path = tmp_path / "moved/vllm/v1/core/sched/scheduler.py"
    path.unlink()
    finding = probe(moved)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert (finding.where, finding.found) == (str(path), "no such file")
    assert "Scheduler.__init__" in finding.expected


def test_unpatched_fails_without_a_block_size():
    """Both releases of vLLM require what 0.3.0 leaves out."""
    arguments = {"vllm_config": None, "kv_cache_config": None, "structured_output_manager": None}
    with unpatched() as module, pytest.raises(TypeError, match="block_size"):
        module.Scheduler(**arguments)


@pytest.mark.engine
@pytest.mark.skipif(not _NEEDED, reason="this vLLM takes the size that 0.4 asked for")
def test_generator_fails_without_it():
    with (
        skipping("scheduler_init") as module,
        pytest.raises((TypeError, AssertionError)) as raised,
        engine(module),
    ):
        pass
    if is_0_3():
        assert "required positional argument: 'block_size'" in str(raised.value)
    else:  # 16 is not divided by the size that the workers chose
        assert raised.type is AssertionError
        assert "kv_cache_coordinator.py" in str(raised.traceback[-1].path)
        assert "block_size" in str(raised.traceback[-1].statement)


@pytest.mark.engine
def test_patched_values_are_right(monkeypatch):
    given: dict[str, Any] = {}
    with unpatched() as module:
        original = module.Scheduler
    accepted = set(inspect.signature(original).parameters)

    def recorded(vllm_config, **arguments):
        given.update(arguments)
        return original(vllm_config=vllm_config, **arguments)

    monkeypatch.setattr(module, "Scheduler", recorded)
    with patched() as module, engine(module) as generator:
        # The size of the one group that the workers reported, not speculators' constant.
        [group] = generator.scheduler.kv_cache_config.kv_cache_groups
        size = group.kv_cache_spec.block_size
        assert generator.vllm_config.cache_config.block_size == size
        assert generator.scheduler.block_size == given["block_size"] == size
        assert (size == module.VLLM_BLOCK_SIZE) is not _CHOSEN_BY_VLLM
        sizes = {name: value for name, value in given.items() if "block_size" in name}
        if _CHOSEN_BY_VLLM:
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes as resolve

            resolved = resolve(generator.scheduler.kv_cache_config, generator.vllm_config)
            assert (sizes["block_size"], sizes["hash_block_size"]) == resolved == (size, size)
        else:
            assert sizes == {"block_size": size}
        assert given.keys() <= accepted
        prompts = [prompt(n, seed=n) for n in (size, 2 * size + 1, size - 1)]
        assert_right(generator.generate(prompts), prompts)


def test_sizes_of_several_groups():
    """As EngineCore settles them: the configuration gets the smallest, the scheduler what fits."""
    from vllm.v1.core import kv_cache_utils

    from speculators_vllm_compat.patches.scheduler_init import block_sizes

    def settle(*sizes: int) -> tuple[dict[str, int], int]:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = [
            SimpleNamespace(
                kv_cache_spec=FullAttentionSpec(
                    block_size=size, num_kv_heads=2, head_size=32, dtype=torch.float32
                )
            )
            for size in sizes
        ]
        cache = SimpleNamespace(block_size=16, enable_prefix_caching=False, prefix_match_unit=None)
        parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
        config = SimpleNamespace(
            cache_config=cache, parallel_config=parallel, kv_transfer_config=None
        )
        return block_sizes(SimpleNamespace(kv_cache_groups=groups), config), cache.block_size

    resolves = hasattr(kv_cache_utils, "resolve_kv_cache_block_sizes")
    assert resolves is _CHOSEN_BY_VLLM
    for sizes, smallest, common in (((), 16, 16), ((64,), 64, 64), ((64, 32, 48), 32, 192)):
        found, configured = settle(*sizes)
        assert configured == smallest
        if resolves:
            assert found == {"block_size": common, "hash_block_size": common}
        else:
            assert found == {"block_size": smallest}


def test_applied_by_hand_to_older_and_newer_forms(patch_named):
    def oldest(vllm_config, kv_cache_config, structured_output_manager):  # 0.11.0
        return locals()

    def older(vllm_config, kv_cache_config, structured_output_manager, block_size):
        return locals()

    def newer(
        vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=None
    ):
        return locals()

    for form in (oldest, older, newer):
        for asked in ({}, {"block_size": 16}):
            group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=64))
            config = SimpleNamespace(
                cache_config=SimpleNamespace(block_size=16),
                parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            )
            module, ledger = ModuleType(GENERATOR), Ledger()
            module.Scheduler = form
            patch_named("scheduler_init").apply(module, ledger)
            taken = module.Scheduler(
                vllm_config=config,
                kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
                structured_output_manager=None,
                **asked,
            )
            names = [n for n in inspect.signature(form).parameters if "block_size" in n]
            expected = dict.fromkeys(names, 64)
            if "hash_block_size" in names and not _CHOSEN_BY_VLLM:
                expected["hash_block_size"] = None  # this vLLM does not tell the two apart
            assert {name: taken[name] for name in names} == expected
            ledger.undo()
            assert module.Scheduler is form


@pytest.mark.skipif(_NEEDED, reason="needed for this pair")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        before = module.Scheduler
    with patched() as module:
        assert module.Scheduler is before


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.Scheduler
    with patched() as module:
        assert (module.Scheduler is before) is not _NEEDED
    assert module.Scheduler is before
