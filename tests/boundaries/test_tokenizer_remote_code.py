"""AutoTokenizer's trust_remote_code, which the generator passes to the model's config only."""

from __future__ import annotations

import json
import shutil
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import cell
from cell import assert_right, engine, patched, skipping, unpatched
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import GENERATOR, Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_CODE = """
from transformers import PreTrainedTokenizerFast


class TokenizerAsCode(PreTrainedTokenizerFast):
    ran_the_models_code = True
"""
_CALL = "self.tokenizer = AutoTokenizer.from_pretrained(model_path)"


def _sources(folder: Path, statement: str) -> Sources:
    """A speculators that consists of the generator's module, with this statement in line 5."""
    path = folder / "speculators" / "data_generation" / "vllm_hidden_states_generator.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from transformers import AutoTokenizer\n\nclass VllmHiddenStatesGenerator:\n"
        f"    def __init__(self, model_path):\n        {statement}\n"
    )
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


@pytest.fixture
def with_code(tmp_path, monkeypatch) -> Path:
    """The tiny Llama with a tokenizer that is code; what cell.engine then starts."""
    import transformers.dynamic_module_utils as code_modules

    folder = tmp_path / "llama_with_code"
    shutil.copytree(cell.model("llama"), folder)
    (folder / "tokenizer_as_code.py").write_text(_CODE)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "TokenizerAsCode"
    config["auto_map"] = {"AutoTokenizer": [None, "tokenizer_as_code.TokenizerAsCode"]}
    path.write_text(json.dumps(config))
    monkeypatch.setattr(code_modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(cell, "model", lambda _name: folder)
    return folder


@pytest.fixture
def questions(monkeypatch) -> list[Any]:
    """What was asked at the terminal, where nobody answers."""
    asked = []

    def nobody(*question: Any) -> str:
        asked.append(question)
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    return asked


def test_probe(finding_of):
    finding = finding_of("tokenizer_remote_code")
    assert finding.verdict is Verdict.NEEDED
    path, line = finding.where.rsplit(":", 1)
    with unpatched() as module:
        assert path == module.__file__
    with open(path) as file:  # noqa: PTH123 - lines, as they are counted
        assert file.readlines()[int(line) - 1].strip() == _CALL


@pytest.mark.parametrize(
    ("call", "verdict"),
    [
        (_CALL, Verdict.NEEDED),
        (_CALL.replace(")", ", use_fast=True)"), Verdict.NEEDED),
        (_CALL.replace(")", ", trust_remote_code=True)"), Verdict.NOT_NEEDED),
        (_CALL.replace(")", ", trust_remote_code=trust)"), Verdict.NOT_NEEDED),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, call, verdict):
    finding = patch_named("tokenizer_remote_code").probe(_sources(tmp_path, call))
    assert finding.verdict is verdict
    assert finding.where.endswith("data_generation/vllm_hidden_states_generator.py:5")
    assert ("without" in finding.found) is (verdict is Verdict.NEEDED)


@pytest.mark.parametrize(
    "statement",
    ["self.tokenizer = get_tokenizer(model_path)", "self.tokenizer = AutoTokenizer(model_path)"],
)
def test_drifted_form(tmp_path, patch_named, statement):
    finding = patch_named("tokenizer_remote_code").probe(_sources(tmp_path, statement))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where.endswith("data_generation/vllm_hidden_states_generator.py")
    assert finding.found == "no AutoTokenizer.from_pretrained"
    assert "AutoTokenizer.from_pretrained" in finding.expected


def test_module_gone(tmp_path, patch_named):
    sources = _sources(tmp_path, _CALL)
    folder = tmp_path / "speculators" / "data_generation"
    folder.rename(folder.with_name("datagen"))
    finding = patch_named("tokenizer_remote_code").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{folder}/vllm_hidden_states_generator.py"
    assert finding.found == "no such file"


@pytest.mark.usefixtures("with_code")
def test_generator_fails_without_it(questions):
    with (
        skipping("tokenizer_remote_code") as module,
        pytest.raises(ValueError, match="trust_remote_code"),
        engine(module),
    ):
        pass
    assert len(questions) == 1


@pytest.mark.engine
@pytest.mark.usefixtures("with_code")
def test_patched_values_are_right(questions):
    prompts = [prompt(n, seed=n) for n in (19, 4)]
    with patched() as module, engine(module) as generator:
        assert generator.tokenizer.ran_the_models_code
        assert generator.tokenizer.eos_token_id == 2
        assert_right(generator.generate(prompts), prompts)
    assert not questions


def test_what_the_caller_says_is_kept(with_code, questions):
    with patched() as module:
        tokenizer = module.AutoTokenizer.from_pretrained(str(with_code))
        assert tokenizer.ran_the_models_code
        with pytest.raises(ValueError, match="trust_remote_code"):
            module.AutoTokenizer.from_pretrained(str(with_code), trust_remote_code=False)
    assert not questions


def test_only_the_generators_view_changes():
    import transformers

    original = transformers.AutoTokenizer
    method = vars(original)["from_pretrained"]
    with patched() as module:
        assert transformers.AutoTokenizer is original
        assert vars(original)["from_pretrained"] is method
        assert module.AutoTokenizer is not original
        assert module.AutoTokenizer.register == original.register
        assert module.AutoTokenizer.__name__ == "AutoTokenizer"


def test_applied_by_hand_it_adds_one_argument(patch_named):
    class Tokenizer:
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            return cls, args, kwargs

    module, ledger = ModuleType(GENERATOR), Ledger()
    module.AutoTokenizer = Tokenizer
    patch_named("tokenizer_remote_code").apply(module, ledger)
    load = module.AutoTokenizer.from_pretrained
    assert load("model") == (Tokenizer, ("model",), {"trust_remote_code": True})
    # A speculators that says it itself is not contradicted.
    for trust in (True, False):
        assert load("model", trust_remote_code=trust)[2] == {"trust_remote_code": trust}
    ledger.undo()
    assert module.AutoTokenizer is Tokenizer


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.AutoTokenizer
    with patched() as module:
        assert module.AutoTokenizer is not before
    assert module.AutoTokenizer is before
