"""Request's eos_token_id, which vLLM 0.17 removed."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from cell import assert_right, engine, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import Ledger, Sources, Verdict
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_TAKES_EOS = vllm_version().startswith("0.16.")
_FIRST = "self, request_id, prompt_token_ids, sampling_params, pooling_params"
_LAST = "priority=0, trace_headers=None, block_hasher=None"
# Request.__init__ as the releases spell it, annotations left out.
_FORMS = {
    "0.11.0": f"{_FIRST}, eos_token_id, client_index=0, arrival_time=None, prompt_embeds=None, "
    "mm_features=None, lora_request=None, structured_output_request=None, cache_salt=None, "
    f"{_LAST}",
    "0.12.0": f"{_FIRST}, eos_token_id, client_index=0, arrival_time=None, prompt_embeds=None, "
    f"mm_features=None, lora_request=None, cache_salt=None, {_LAST}",
    "0.16.0": f"{_FIRST}, eos_token_id, client_index=0, arrival_time=None, {_LAST}, "
    "resumable=False, reasoning_ended=None",
    "0.17.0": f"{_FIRST}, client_index=0, arrival_time=None, {_LAST}, resumable=False",
    "0.26.0": f"{_FIRST}, client_index=0, arrival_time=None, prompt_embeds=None, "
    f"prompt_is_token_ids=None, {_LAST}, resumable=False, abort_immediately=False",
    "0.33.0": f"{_FIRST}, client_index=0, arrival_time=None, {_LAST}, session_id=None, "
    "kv_hints=None",
}


def _sources(folder: Path, parameters: str, name: str = "Request") -> Sources:
    """A vLLM that consists of v1/request.py."""
    path = folder / "vllm" / "v1" / "request.py"
    path.parent.mkdir(parents=True)
    text = f"import time\n\n\nclass {name}:\n    def __init__({parameters}): ...\n"
    path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def _arguments() -> dict[str, Any]:
    """What generate() passes, of both releases of speculators."""
    from vllm.sampling_params import SamplingParams

    return {
        "request_id": "req_0_0",
        "prompt_token_ids": prompt(5, seed=0),
        "sampling_params": SamplingParams(max_tokens=1, temperature=0.0),
        "pooling_params": None,
        "eos_token_id": 2,
        "arrival_time": 0.0,
    }


def test_probe(finding_of):
    from vllm.v1.request import Request

    takes = "eos_token_id" in inspect.signature(Request.__init__).parameters
    assert takes is _TAKES_EOS
    finding = finding_of("request_init")
    assert finding.verdict is (Verdict.NOT_NEEDED if takes else Verdict.NEEDED)
    file, line = inspect.getsourcefile(Request), inspect.getsourcelines(Request.__init__)[1]
    assert finding.where == f"{file}:{line}"


@pytest.mark.parametrize("release", _FORMS)
def test_probe_of_other_releases(tmp_path, patch_named, release):
    finding = patch_named("request_init").probe(_sources(tmp_path, _FORMS[release]))
    needed = tuple(map(int, release.split("."))) >= (0, 17, 0)
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where == f"{tmp_path}/vllm/v1/request.py:5"


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (_FORMS["0.17.0"].replace("prompt_token_ids", "token_ids"), "takes no prompt_token_ids"),
        (_FORMS["0.17.0"].replace("block_hasher", "hasher"), "takes no block_hasher"),
        (_FORMS["0.17.0"].replace("arrival_time", "arrived"), "takes no arrival_time"),
        (_FORMS["0.17.0"].replace("client_index=0", "client_index"), "requires client_index"),
        (_FORMS["0.16.0"].replace("eos_token_id", "eos_id"), "requires eos_id"),
    ],
)
def test_drifted_form(tmp_path, patch_named, parameters, found):
    # Keyword-only, so that a required one may follow an optional one.
    parameters = parameters.replace("self, ", "self, *, ")
    finding = patch_named("request_init").probe(_sources(tmp_path, parameters))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/v1/request.py:5"
    assert found in finding.found
    assert "'block_hasher'" in finding.expected
    assert "with or without eos_token_id" in finding.expected


def test_moved_or_gone(tmp_path, patch_named):
    probe = patch_named("request_init").probe
    gone = probe(_sources(tmp_path / "gone", _FORMS["0.33.0"], "EngineRequest"))
    assert gone.verdict is Verdict.UNKNOWN_FORM
    assert gone.where == f"{tmp_path}/gone/vllm/v1/request.py"
    assert "no Request.__init__" in gone.found
    moved = _sources(tmp_path / "moved", _FORMS["0.33.0"])
    (tmp_path / "moved/vllm/v1/request.py").rename(tmp_path / "moved/vllm/v1/requests.py")
    finding = probe(moved)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/moved/vllm/v1/request.py"
    assert finding.found == "no such file"
    assert "Request.__init__" in finding.expected


@pytest.mark.skipif(_TAKES_EOS, reason="this vLLM takes eos_token_id")
def test_unpatched_fails():
    with unpatched() as module, pytest.raises(TypeError, match="eos_token_id"):
        module.Request(**_arguments())


@pytest.mark.engine
@pytest.mark.skipif(_TAKES_EOS, reason="this vLLM takes eos_token_id")
def test_generate_fails_without_it():
    with skipping("request_init") as module, engine(module) as generator:
        with pytest.raises(TypeError, match="eos_token_id"):
            generator.generate([prompt(5, seed=1)])
        assert not generator.scheduler.requests


@pytest.mark.engine
def test_patched_values_are_right(monkeypatch):
    from vllm.v1.request import Request

    prompts = [prompt(n, seed=n) for n in (40, 3, 17)]
    requests = []
    with patched() as module, engine(module) as generator:
        add = generator.scheduler.add_request
        monkeypatch.setattr(
            generator.scheduler, "add_request", lambda r: (requests.append(r), add(r))
        )
        assert_right(generator.generate(prompts), prompts)
        eos_token_id = generator.tokenizer.eos_token_id
    assert [type(request) for request in requests] == [Request] * 3
    assert [list(request.prompt_token_ids) for request in requests] == prompts
    if _TAKES_EOS:
        assert [request.eos_token_id for request in requests] == [eos_token_id] * 3 == [2] * 3


@pytest.mark.skipif(_TAKES_EOS, reason="not needed where Request takes eos_token_id")
def test_only_eos_token_id_is_left_out():
    with patched() as module:
        request = module.Request(**_arguments(), priority=7)
    assert request.request_id == "req_0_0"
    assert list(request.prompt_token_ids) == prompt(5, seed=0)
    assert request.arrival_time == 0.0
    assert request.priority == 7


@pytest.mark.skipif(not _TAKES_EOS, reason="needed where Request takes no eos_token_id")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        before = module.Request
    with patched() as module:
        assert module.Request is before
        assert module.Request(**_arguments()).eos_token_id == 2


def test_applied_by_hand_to_an_older_form_it_changes_nothing(patch_named):
    def older(*, request_id, eos_token_id):
        return request_id, eos_token_id

    def newer(*, request_id):
        return request_id

    for form, expected in ((older, ("req", 2)), (newer, "req")):
        module, ledger = ModuleType("generator"), Ledger()
        module.Request = form
        patch_named("request_init").apply(module, ledger)
        assert module.Request(request_id="req", eos_token_id=2) == expected
        ledger.undo()
        assert module.Request is form


def test_a_replacement_that_takes_eos_token_id_gets_it(monkeypatch):
    def replacement(*, request_id, eos_token_id):
        return request_id, eos_token_id

    with unpatched() as module:
        monkeypatch.setattr(module, "Request", replacement)
    with patched() as module:
        assert module.Request(request_id="req", eos_token_id=2) == ("req", 2)
    assert module.Request is replacement


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        before = module.Request
    with patched() as module:
        assert (module.Request is before) is _TAKES_EOS
    assert module.Request is before
