"""Where the decoder is in the model that the runner holds."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from sources import WORKER, sources

from cell import assert_right, engine, patched
from speculators_vllm_compat.patches.language_model import find_decoder
from speculators_vllm_compat.patching import CUSTOM_WORKER, Verdict
from tiny_models import prompt

_TEXT_ONLY = (
    "class HiddenStatesWorkerExtension:\n"
    "    def _setup_hidden_states_capture(self, layer_ids):\n        base = model.model\n"
)
_WRAPPERS = _TEXT_ONLY.replace("model.model", "model.get_language_model().model")
_INTERFACES = "vllm/model_executor/models/interfaces.py"
_EACH_ITS_OWN = (
    "class SupportsMultiModal:\n    def get_language_model(self):\n        'It.'\n        ...\n"
)
_GENERIC = _EACH_ITS_OWN.replace("...", "return candidate")


class Text(torch.nn.Module):
    """A text model: model.layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = decoder()


class Wrapper(torch.nn.Module):
    """A multimodal wrapper around a language model, or around its decoder."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def get_language_model(self) -> torch.nn.Module:
        return self.language_model


def decoder() -> torch.nn.Module:
    made = torch.nn.Module()
    made.layers = torch.nn.ModuleList([torch.nn.Identity()])
    return made


def test_probe(finding_of):
    # 0.3.0 knows no wrappers; from 0.15 on, a wrapper may hand out the decoder itself.
    assert finding_of("language_model").verdict is Verdict.NEEDED


@pytest.mark.parametrize(
    ("worker", "interfaces", "expected"),
    [
        (_TEXT_ONLY, _EACH_ITS_OWN, Verdict.NEEDED),
        (_WRAPPERS, _EACH_ITS_OWN, Verdict.NOT_NEEDED),
        (_WRAPPERS, _GENERIC, Verdict.NEEDED),
        (_WRAPPERS, _GENERIC.replace("(self)", "(self, modality)"), Verdict.UNKNOWN_FORM),
        (_WRAPPERS, "class SupportsMultiModal: ...\n", Verdict.UNKNOWN_FORM),
        ("class Extension: ...\n", _GENERIC, Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, worker, interfaces, expected):
    read = sources(tmp_path, {WORKER: worker, _INTERFACES: interfaces})
    finding = patch_named("language_model").probe(read)
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert ".py" in finding.where
        assert finding.expected


def test_every_kind_of_model():
    text, inner = Text(), decoder()
    assert find_decoder(text) is text.model
    assert find_decoder(Wrapper(text)) is text.model
    assert find_decoder(Wrapper(inner)) is inner
    with pytest.raises(RuntimeError, match=r"no decoder layers found in .*Identity; expected"):
        find_decoder(torch.nn.Identity())


def test_unpatched_fails_where_a_wrapper_hands_out_the_decoder(monkeypatch):
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    worker = module.HiddenStatesWorkerExtension()
    worker.model_runner = SimpleNamespace(
        model=Wrapper(decoder()), input_batch=None, input_ids=None, execute_model=None
    )
    with pytest.raises((AttributeError, ValueError)):
        worker._setup_hidden_states_capture([0])
    monkeypatch.setattr("vllm.distributed.get_tp_group", lambda: SimpleNamespace(rank_in_group=0))
    with patched():
        assert worker._setup_hidden_states_capture([0]).startswith("speculators-vllm-compat")


@pytest.mark.engine
def test_patched_values_are_right():
    prompts = [prompt(n, seed=n) for n in (20, 4)]
    with patched() as module, engine(module, "qwen3") as generator:
        assert_right(generator.generate(prompts), prompts, "qwen3")
