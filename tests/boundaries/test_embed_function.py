"""The name of the embedding function, in speculators' replaced forward."""

from __future__ import annotations

import importlib

import pytest
import torch
from sources import WORKER, sources

from cell import assert_right, engine, is_0_3, patched
from speculators_vllm_compat.patches.embed_function import embed_function
from speculators_vllm_compat.patching import CUSTOM_WORKER, Verdict
from tiny_models import prompt

_LLAMA = "vllm/model_executor/models/llama.py"
_OLD, _NEW = "get_input_embeddings", "embed_input_ids"


def _model(name: str) -> str:
    return f"class LlamaModel:\n    def {name}(self, input_ids): ...\n"


def test_probe(finding_of):
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("embed_function").verdict is expected


@pytest.mark.parametrize(
    ("called", "model", "expected"),
    [
        (_OLD, _model(_OLD), Verdict.NOT_NEEDED),
        (_OLD, _model(_NEW), Verdict.NEEDED),
        (_NEW, _model(_OLD), Verdict.NEEDED),
        (_NEW, _model(_NEW), Verdict.NOT_NEEDED),
        (_NEW, _model("embed"), Verdict.UNKNOWN_FORM),
        ("embed", _model(_NEW), Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, called, model, expected):
    worker = f"def _patched_forward(self, input_ids):\n    self.{called}(input_ids)\n"
    read = sources(tmp_path, {WORKER: worker, _LLAMA: model})
    finding = patch_named("embed_function").probe(read)
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert ".py" in finding.where
        assert finding.expected


@pytest.mark.parametrize("name", [_NEW, _OLD, "embed_tokens"])
def test_the_models_own_function_is_found(name):
    decoder = torch.nn.Module()
    setattr(decoder, name, lambda ids: ids * 2)
    assert embed_function(decoder)(3) == 6


def test_a_models_scaling_function_comes_before_its_table():
    decoder = torch.nn.Module()
    decoder.embed_tokens = torch.nn.Embedding(4, 2)
    decoder.embed_input_ids = lambda ids: decoder.embed_tokens(ids) * 8
    ids = torch.tensor([1])
    assert embed_function(decoder)(ids).equal(decoder.embed_tokens(ids) * 8)


def test_none_of_the_names():
    with pytest.raises(RuntimeError, match=r"Module has none of embed_input_ids, get_input_"):
        embed_function(torch.nn.Module())


@pytest.mark.skipif(not is_0_3(), reason="0.4 knows the name of these releases")
def test_unpatched_forward_fails(monkeypatch):
    with patched():
        module = importlib.import_module(CUSTOM_WORKER)
    group = type("Group", (), {"is_first_rank": True})()
    monkeypatch.setattr(module, "get_pp_group", lambda: group)
    decoder = torch.nn.Module()
    decoder.embed_input_ids = torch.nn.Embedding(4, 2)
    with pytest.raises(AttributeError, match=_OLD):
        module._patched_forward(decoder, torch.tensor([1]), torch.tensor([0]))


@pytest.mark.engine
def test_replaced_forward_gives_right_values(monkeypatch):
    monkeypatch.setenv("SPECULATORS_VLLM_COMPAT_FORWARD", "replaced")
    prompts = [prompt(n, seed=n) for n in (33, 2)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)
