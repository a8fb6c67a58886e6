"""init_none_hash, which sets the root of every chain of block hashes before a hasher exists."""

from __future__ import annotations

import inspect
import multiprocessing
import os
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cell import assert_right, engine, is_0_3, patched, skipping, unpatched, vllm_version
from speculators_vllm_compat.detect import Package
from speculators_vllm_compat.patching import (
    GENERATOR,
    GENERATOR_CLASS,
    Ledger,
    Sources,
    Verdict,
)
from speculators_vllm_compat.source import SourceTree
from tiny_models import prompt

if TYPE_CHECKING:
    from pathlib import Path

_ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
_UTILS = "v1/core/kv_cache_utils.py"
_FORM = "NONE_HASH: BlockHash\n\n\ndef init_none_hash(hash_fn): ...\n"  # every release
_SILENT = "class VllmHiddenStatesGenerator: ...\n"  # 0.3.0
_CALLS = "import vllm\n\ninit_none_hash(caching_hash_fn)\n"  # 0.4


def _sources(folder: Path, form: str, generator: str) -> Sources:
    """A vLLM and a speculators that consist of these two modules."""
    files = {
        f"vllm/{_UTILS}": form,
        "speculators/data_generation/vllm_hidden_states_generator.py": generator,
    }
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


@pytest.fixture
def kv_cache_utils(monkeypatch) -> Any:
    """vLLM's module as a fresh process has it: NONE_HASH is annotated, and not there."""
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    yield kv_cache_utils
    vars(kv_cache_utils).pop("NONE_HASH", None)  # what was there before comes back after this


@pytest.fixture
def calls(monkeypatch, kv_cache_utils) -> list[tuple[str, Any]]:
    """What was called, and with which hash function: vLLM's two functions, in order."""
    seen: list[tuple[str, Any]] = []
    init, build = kv_cache_utils.init_none_hash, kv_cache_utils.get_request_block_hasher

    def init_none_hash(hash_fn):
        seen.append(("init_none_hash", hash_fn))
        return init(hash_fn)

    def get_request_block_hasher(block_size, hash_fn):
        assert kv_cache_utils.NONE_HASH  # the hasher's root is there before the hasher
        seen.append(("get_request_block_hasher", hash_fn))
        return build(block_size, hash_fn)

    with unpatched() as module:
        homes = [kv_cache_utils] if is_0_3() else [kv_cache_utils, module]  # 0.4 imports the names
    for home in homes:
        monkeypatch.setattr(home, "init_none_hash", init_none_hash)
        monkeypatch.setattr(home, "get_request_block_hasher", get_request_block_hasher)
    return seen


@pytest.fixture
def by_hand(patch_named):
    """A generator's module made by hand, with the hash patches applied as they are in the plan."""

    def constructor(self, algorithm: str) -> None:
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm, block_size=16)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    module, ledger = ModuleType(GENERATOR), Ledger()
    setattr(module, GENERATOR_CLASS, type(GENERATOR_CLASS, (), {"__init__": constructor}))
    for patch_id in ("none_hash", "block_hasher"):
        patch_named(patch_id).apply(module, ledger)
    yield getattr(module, GENERATOR_CLASS)
    ledger.undo()
    assert vars(getattr(module, GENERATOR_CLASS))["__init__"] is constructor


def _hash_function(algorithm: str) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(algorithm)


def test_probe(finding_of):
    from vllm.v1.core import kv_cache_utils

    assert list(inspect.signature(kv_cache_utils.init_none_hash).parameters) == ["hash_fn"]
    with unpatched() as module:
        assert hasattr(module, "init_none_hash") is not is_0_3()
    expected = Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED
    finding = finding_of("none_hash")
    assert finding.verdict is expected
    assert finding.where.split(":")[0] == module.__file__


@pytest.mark.parametrize(
    ("generator", "verdict", "where"),
    [(_SILENT, Verdict.NEEDED, ""), (_CALLS, Verdict.NOT_NEEDED, ":3")],
)
@pytest.mark.parametrize(
    "form",
    [_FORM, _FORM.replace("BlockHash", "BlockHash = BlockHash(b'')")],
    ids=["0.11.0 to 0.33.0", "with a value"],
)
def test_probe_of_other_releases(tmp_path, patch_named, form, generator, verdict, where):
    finding = patch_named("none_hash").probe(_sources(tmp_path, form, generator))
    assert finding.verdict is verdict
    assert finding.where.endswith(f"vllm_hidden_states_generator.py{where}")


@pytest.mark.parametrize("generator", [_SILENT, _CALLS])
@pytest.mark.parametrize(
    ("change", "line", "found", "expected"),
    [
        (("(hash_fn)", "(hash_function)"), 4, "takes no hash_fn", "init_none_hash(hash_fn)"),
        (("(hash_fn)", "(hash_fn, seed)"), 4, "requires seed", "init_none_hash(hash_fn)"),
        (("(hash_fn)", "()"), 4, "takes no hash_fn", "init_none_hash(hash_fn)"),
        (("def init_none_hash", "def set_root"), None, "no init_none_hash", "init_none_hash"),
        (("NONE_HASH:", "ROOT_HASH:"), None, "no NONE_HASH", "NONE_HASH"),
    ],
)
def test_drifted_form(tmp_path, patch_named, generator, change, line, found, expected):
    finding = patch_named("none_hash").probe(_sources(tmp_path, _FORM.replace(*change), generator))
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}" + (f":{line}" if line else "")
    assert found in finding.found
    assert expected in finding.expected


def test_module_gone(tmp_path, patch_named):
    sources = _sources(tmp_path, _FORM, _SILENT)
    (tmp_path / "vllm" / _UTILS).unlink()
    finding = patch_named("none_hash").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}"
    assert finding.found == "no such file"


def test_unpatched_the_first_block_raises(kv_cache_utils):
    with pytest.raises(NameError, match="NONE_HASH"):
        kv_cache_utils.hash_block_tokens(_hash_function("sha256"), None, [1, 2, 3])


@pytest.mark.engine
@pytest.mark.usefixtures("kv_cache_utils")
@pytest.mark.skipif(not is_0_3(), reason="0.4 calls init_none_hash itself")
def test_generate_fails_without_it():
    with skipping("none_hash") as module, engine(module) as generator:
        with pytest.raises(NameError, match="NONE_HASH"):
            generator.generate([prompt(200, seed=1)])
        assert not generator.scheduler.requests


@pytest.mark.engine
def test_patched_values_are_right(kv_cache_utils, calls):
    """Of 0.4 as of 0.3.0: set once, with the function of the hasher that is built after it."""
    prompts = [prompt(n, seed=n) for n in (400, 129, 15)]
    with patched() as module, engine(module) as generator:
        function = _hash_function(generator.vllm_config.cache_config.prefix_caching_hash_algo)
        assert calls == [("init_none_hash", function), ("get_request_block_hasher", function)]
        root = kv_cache_utils.NONE_HASH
        assert isinstance(root, bytes)
        assert len(root) == 32
        for _ in range(2):
            assert_right(generator.generate(prompts), prompts)
        assert len(calls) == 2
        assert kv_cache_utils.NONE_HASH is root


@pytest.mark.parametrize("algorithm", _ALGORITHMS)
def test_set_once_before_the_hasher(kv_cache_utils, calls, by_hand, algorithm):
    by_hand(algorithm)
    function = _hash_function(algorithm)
    assert calls == [("init_none_hash", function), ("get_request_block_hasher", function)]
    assert kv_cache_utils.NONE_HASH


@pytest.mark.parametrize("algorithm", _ALGORITHMS)
def test_a_second_generator_does_not_change_it(
    monkeypatch, kv_cache_utils, calls, by_hand, algorithm
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    by_hand(algorithm)
    root = kv_cache_utils.NONE_HASH
    for _ in range(2):
        by_hand(algorithm)
    assert kv_cache_utils.NONE_HASH is root
    assert [name for name, _ in calls] == ["init_none_hash", *["get_request_block_hasher"] * 3]


def test_another_algorithm_sets_it_anew(kv_cache_utils, calls, by_hand):
    by_hand("sha256")
    by_hand("xxhash_cbor")
    functions = [function for name, function in calls if name == "init_none_hash"]
    assert functions == [_hash_function("sha256"), _hash_function("xxhash_cbor")]
    assert kv_cache_utils.NONE_HASH


def test_a_root_somebody_else_set_meanwhile_is_not_taken_for_ours(kv_cache_utils, calls, by_hand):
    by_hand("sha256")
    kv_cache_utils.NONE_HASH = b"of an engine with another algorithm"
    by_hand("sha256")
    assert [name for name, _ in calls].count("init_none_hash") == 2
    assert kv_cache_utils.NONE_HASH != b"of an engine with another algorithm"


def _roots(seed: str | None, pipe: Any) -> None:
    """In a process of its own: the root of each algorithm, ours and then vLLM's own."""
    from vllm.v1.core import kv_cache_utils

    from speculators_vllm_compat.patches.none_hash import ensure_none_hash

    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    roots = {}
    for algorithm in _ALGORITHMS:
        vars(kv_cache_utils).pop("NONE_HASH", None)
        ensure_none_hash(_hash_function(algorithm))
        ours = kv_cache_utils.NONE_HASH
        kv_cache_utils.init_none_hash(_hash_function(algorithm))
        roots[algorithm] = ours, kv_cache_utils.NONE_HASH
    pipe.send(roots)


def _in_a_process(seed: str | None) -> dict[str, tuple[bytes, bytes]]:
    import vllm.v1.core.kv_cache_utils  # noqa: F401 - here, so that no child spends ten seconds

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_roots, args=(seed, sender))
    child.start()
    assert receiver.poll(60)
    roots = receiver.recv()
    child.join(60)
    assert child.exitcode == 0
    return roots


def test_with_pythonhashseed_it_is_reproducible():
    for seed in ("0", "42"):
        for algorithm, (ours, vllms) in _in_a_process(seed).items():
            assert ours == vllms == _hash_function(algorithm)(seed)


def test_without_pythonhashseed_it_is_as_random_as_vllms():
    first, second = _in_a_process(None), _in_a_process(None)
    fixed_for_sha256 = not vllm_version().startswith("0.16.")  # by a constant seed of vLLM's
    for algorithm in _ALGORITHMS:
        function = _hash_function(algorithm)
        fixed = fixed_for_sha256 and algorithm.startswith("sha256")
        roots = {*first[algorithm], *second[algorithm]}
        assert len(roots) == (1 if fixed else 4)
        if fixed:
            assert roots == {function("vllm-none-hash")}
        for root in roots:
            assert len(root) == (32 if not fixed_for_sha256 else len(function("any")))


@pytest.mark.skipif(is_0_3(), reason="needed for 0.3.0")
def test_declined_where_it_is_not_needed():
    """Nothing is wrapped for it, so speculators' own call stays the only one."""
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = vars(owner)["__init__"]
    with patched():
        assert vars(owner)["__init__"] is before


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = vars(owner)["__init__"]
    with skipping("block_hasher"):  # which wraps the same name
        assert (vars(owner)["__init__"] is before) is not is_0_3()
    assert vars(owner)["__init__"] is before
    with patched():
        assert getattr(module, GENERATOR_CLASS) is owner
    assert vars(owner)["__init__"] is before
