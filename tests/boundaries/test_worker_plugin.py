"""The plugin that patches workers: registered, not filtered out, and answering."""

from __future__ import annotations

import multiprocessing
from importlib import metadata

import pytest
from sources import sources

from cell import assert_right, engine, patched, unpatched
from speculators_vllm_compat.errors import WorkerError
from speculators_vllm_compat.patches.decoder_layer_call import GREETING
from speculators_vllm_compat.patches.worker_plugin import (
    check_greetings,
    refuse_unpatched_workers,
)
from speculators_vllm_compat.patching import GENERATOR_CLASS, Verdict
from tiny_models import prompt

_LOAD = "DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'\ndef load_general_plugins(): ...\n"
_PLUGINS = {"vllm/plugins/__init__.py": _LOAD}
_CALLS = "def init_worker():\n    load_general_plugins()\n"


def test_probe(finding_of):
    finding = finding_of("worker_plugin")
    assert finding.verdict is Verdict.NEEDED
    assert "worker_base.py:" in finding.where


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({**_PLUGINS, "vllm/v1/worker/worker_base.py": _CALLS}, Verdict.NEEDED),
        ({**_PLUGINS, "vllm/worker/worker_base.py": _CALLS}, Verdict.NEEDED),  # 0.11.0
        (_PLUGINS, Verdict.UNKNOWN_FORM),
        ({"vllm/v1/worker/worker_base.py": _CALLS}, Verdict.UNKNOWN_FORM),
        (
            {
                "vllm/plugins/__init__.py": _LOAD.replace("general_plugins'", "plugins'"),
                "vllm/v1/worker/worker_base.py": _CALLS,
            },
            Verdict.UNKNOWN_FORM,
        ),
    ],
)
def test_probe_of_other_forms(tmp_path, patch_named, files, expected):
    finding = patch_named("worker_plugin").probe(sources(tmp_path, files))
    assert finding.verdict is expected
    if expected is Verdict.UNKNOWN_FORM:
        assert finding.found
        assert finding.expected


@pytest.mark.parametrize("allowed", ["", "other", "a,b", "speculators-vllm-compat", " speculators"])
def test_filtered_out(monkeypatch, allowed):
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with pytest.raises(WorkerError, match="which leaves out speculators_vllm_compat"):
        refuse_unpatched_workers()


@pytest.mark.parametrize("allowed", [None, "speculators_vllm_compat", "a,speculators_vllm_compat"])
def test_not_filtered_out(monkeypatch, allowed):
    if allowed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    refuse_unpatched_workers()
    [entry] = metadata.entry_points(group="vllm.general_plugins", name="speculators_vllm_compat")
    assert entry.load().__module__ == "speculators_vllm_compat_plugin"


def test_not_registered(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda **_: metadata.EntryPoints())
    with pytest.raises(WorkerError, match=r"no entry point speculators_vllm_compat in vllm\.gen"):
        refuse_unpatched_workers()


def test_greetings():
    check_greetings([GREETING, GREETING])
    with pytest.raises(WorkerError, match=r"workers \[1\] answered None to the set-up of capture"):
        check_greetings([GREETING, None])
    with pytest.raises(WorkerError, match=r"answered 'speculators-vllm-compat 0\.0\.1'"):
        check_greetings(["speculators-vllm-compat 0.0.1"])


@pytest.mark.engine
def test_told_before_a_worker_starts(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    before = set(multiprocessing.active_children())
    with patched() as module, pytest.raises(WorkerError, match="VLLM_PLUGINS"), engine(module):
        pass
    assert set(multiprocessing.active_children()) == before


@pytest.mark.engine
def test_patched_values_are_right_with_the_plugin_named(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "speculators_vllm_compat")
    prompts = [prompt(n, seed=n) for n in (20, 4)]
    with patched() as module, engine(module) as generator:
        assert_right(generator.generate(prompts), prompts)


def test_revert_restores_the_identical_objects():
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = module.MultiprocExecutor, vars(owner)["_setup_capture"]
    with patched():
        assert module.MultiprocExecutor is not before[0]
        assert vars(owner)["_setup_capture"] is not before[1]
    assert (module.MultiprocExecutor, vars(owner)["_setup_capture"]) == before
    assert module.MultiprocExecutor is before[0]
