"""The reply of the one rank that was asked."""

from __future__ import annotations

import pytest
from sources import EXECUTOR, WORKER, sources

from cell import assert_right, engine, is_0_3, patched
from speculators_vllm_compat.patches.rpc_reply import single_reply
from speculators_vllm_compat.patching import GENERATOR_CLASS, Verdict
from tiny_models import prompt

_HEAD = (
    "class MultiprocExecutor:\n"
    "    def collective_rpc(self, method, timeout=None, args=(), unique_reply_rank=None):\n"
    "        responses = ask(method)\n"
)
_LIST = _HEAD + "        return responses\n"  # 0.11.0
_REPLY = _HEAD + "        return responses[0] if unique_reply_rank is not None else responses\n"
_LINE_0_3 = "class HiddenStatesWorkerExtension:\n    def _get_captured_states(self): ...\n"
_LINE_0_4 = _LINE_0_3 + "    def _set_request_metadata(self, request_metadata): ...\n"


def test_probe(finding_of):
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    assert finding_of("rpc_reply").verdict is expected


@pytest.mark.parametrize(
    ("executor", "worker", "expected"),
    [
        (_LIST, _LINE_0_3, Verdict.NOT_NEEDED),
        (_LIST, _LINE_0_4, Verdict.NEEDED),
        (_REPLY, _LINE_0_3, Verdict.NEEDED),
        (_REPLY, _LINE_0_4, Verdict.NOT_NEEDED),
        (_HEAD + "        yield responses\n", _LINE_0_4, Verdict.UNKNOWN_FORM),
        (_REPLY.replace("unique_reply_rank", "rank"), _LINE_0_4, Verdict.UNKNOWN_FORM),
        ("class MultiprocExecutor: ...", _LINE_0_4, Verdict.UNKNOWN_FORM),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, executor, worker, expected):
    read = sources(tmp_path, {EXECUTOR: executor, WORKER: worker})
    finding = patch_named("rpc_reply").probe(read)
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert "multiproc_executor.py" in finding.where
        assert finding.expected


def test_both_forms():
    states = {"req_0_0": []}
    assert single_reply(states) is states
    assert single_reply([states]) is states
    assert single_reply(None) is None


@pytest.mark.engine
def test_the_reply_of_this_release():
    """What the adapter meets: a reply, or a list of one; never the other ranks' as well."""
    with patched() as module, engine(module) as generator:
        reply = generator.executor.collective_rpc(
            "_reset_capture", args=("word",), unique_reply_rank=0
        )
        assert reply == "word"
        assert generator.executor.collective_rpc("_reset_capture", args=("word",)) == ["word"]


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 reads the reply as it comes")
def test_speculators_own_loop_indexes_the_reply(monkeypatch):
    with patched() as module, engine(module) as generator:
        own_loop = vars(getattr(module, GENERATOR_CLASS))["generate"].__wrapped__
        with pytest.raises(KeyError):  # of a dict by request id, the form of every patched worker
            own_loop(generator, [prompt(5, seed=1)])


@pytest.mark.engine
def test_patched_values_are_right():
    prompts = [prompt(n, seed=n) for n in (1, 30)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)
