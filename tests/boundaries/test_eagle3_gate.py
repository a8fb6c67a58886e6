"""The gate of 0.3.0: supports_eagle3."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from sources import WORKER, sources

from cell import assert_right, engine, is_0_3, patched
from speculators_vllm_compat.patching import CUSTOM_WORKER, Verdict
from tiny_models import prompt

_GATED = "def setup(model):\n    if not supports_eagle3(model):\n        raise ValueError\n"


class Ungated(torch.nn.Module):
    """A model that vLLM has no EAGLE-3 support for."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Identity()])


def test_probe(finding_of):
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("eagle3_gate").verdict is expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({WORKER: _GATED}, Verdict.NEEDED),
        ({WORKER: "def setup(model): ...\n"}, Verdict.NOT_NEEDED),
        ({}, Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, files, expected):
    finding = patch_named("eagle3_gate").probe(sources(tmp_path, files))
    assert finding.verdict is expected
    if expected is Verdict.NEEDED:
        assert finding.where.endswith("custom_worker.py:2")


@pytest.mark.skipif(not is_0_3(), reason="0.4 has no gate")
def test_unpatched_refuses_and_patched_accepts(monkeypatch):
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    worker = module.HiddenStatesWorkerExtension()
    worker.model_runner = SimpleNamespace(
        model=Ungated(), input_batch=None, input_ids=None, execute_model=None
    )
    with pytest.raises(ValueError, match="does not support hidden state extraction"):
        worker._setup_hidden_states_capture([0])
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    with patched():
        greeting = worker._setup_hidden_states_capture([0])
    assert greeting.startswith("speculators-vllm-compat ")


@pytest.mark.engine
def test_patched_values_are_right_for_a_model_without_support(monkeypatch):
    """DeepSeek-V2, which vLLM 0.16 does not draft for."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    prompts = [prompt(n, seed=n) for n in (40, 3)]
    with patched() as module, engine(module, "deepseek_v2") as generator:
        assert_right(generator.generate(prompts), prompts, "deepseek_v2")


def test_revert_restores_the_identical_object():
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    own = vars(module.HiddenStatesWorkerExtension)["_setup_hidden_states_capture"]
    with patched():
        changed = vars(module.HiddenStatesWorkerExtension)["_setup_hidden_states_capture"]
        assert changed is not own
    assert vars(module.HiddenStatesWorkerExtension)["_setup_hidden_states_capture"] is own
