"""Block hasher injection: requests hash their blocks as those of vLLM's EngineCore do."""

from __future__ import annotations

import inspect
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
_UTILS, _HASHING = "v1/core/kv_cache_utils.py", "utils/hashing.py"
_BUILD = "def get_request_block_hasher({}): ...\n"
_OMITS = "import vllm\n\nRequest(request_id=a, prompt_token_ids=b)\n"  # 0.3.0
_PASSES = _OMITS.replace("=b)", "=b, block_hasher=self.block_hasher)")  # 0.4
# get_request_block_hasher as the releases spell it, and where the hash functions live.
_FORMS = {
    "0.11.0": ("block_size, caching_hash_fn", "utils/__init__.py"),
    "0.11.1": ("block_size, caching_hash_fn", _HASHING),
    "0.24.0": ("hash_block_size, caching_hash_fn", _HASHING),
    "0.33.0": ("hash_block_size, caching_hash_fn, num_hash_lookahead_tokens=0", _HASHING),
}


def _sources(folder: Path, form: tuple[str, str], generator: str, **files: str) -> Sources:
    """A vLLM and a speculators that consist of these functions and this call."""
    texts = {
        f"vllm/{_UTILS}": files.get("build", _BUILD).format(form[0]),
        f"vllm/{form[1]}": files.get("hashing", "def get_hash_fn_by_name(hash_fn_name): ...\n"),
        "speculators/data_generation/vllm_hidden_states_generator.py": generator,
    }
    for file, text in texts.items():
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    package = Package("vllm", folder / "vllm", ())
    return Sources(SourceTree(folder / "vllm"), SourceTree(folder / "speculators"), None, package)


def _request(ids: list[int], block_hasher: Any = None) -> Any:
    """A Request as it is without a block hasher, or with one."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    takes_eos = "eos_token_id" in inspect.signature(Request.__init__).parameters
    return Request(
        request_id="req",
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=8, temperature=0.0),
        pooling_params=None,
        arrival_time=0.0,
        block_hasher=block_hasher,
        **({"eos_token_id": 2} if takes_eos else {}),
    )


def _expected(ids: list[int], algorithm: str, size: int) -> list[bytes]:
    """The hashes of a prompt's full blocks, block by block, by vLLM's own functions."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    function, parent, hashes = get_hash_fn_by_name(algorithm), None, []
    for start in range(0, len(ids) - size + 1, size):
        parent = hash_block_tokens(function, parent, ids[start : start + size])
        hashes.append(parent)
    return hashes


def _cached(algorithm: str, prefix_caching: bool) -> Any:
    def configure(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = algorithm
        config.cache_config.enable_prefix_caching = prefix_caching

    return configure


def test_probe(finding_of):
    from vllm.v1.request import Request

    assert inspect.signature(Request.__init__).parameters["block_hasher"].default is None
    finding = finding_of("block_hasher")
    assert finding.verdict is (Verdict.NEEDED if is_0_3() else Verdict.NOT_NEEDED)
    with unpatched() as module:
        source = inspect.getsource(module)
    assert ("block_hasher=self.block_hasher" in source) is not is_0_3()
    path, line = finding.where.rsplit(":", 1)
    assert path == module.__file__
    assert source.splitlines()[int(line) - 1].strip() == "req = Request("


@pytest.mark.parametrize("generator", [_OMITS, _PASSES])
@pytest.mark.parametrize("release", _FORMS)
def test_probe_of_other_releases(tmp_path, patch_named, release, generator):
    finding = patch_named("block_hasher").probe(_sources(tmp_path, _FORMS[release], generator))
    needed = generator == _OMITS
    assert finding.verdict is (Verdict.NEEDED if needed else Verdict.NOT_NEEDED)
    assert finding.where.endswith("vllm_hidden_states_generator.py:3")


@pytest.mark.parametrize("generator", [_OMITS, _PASSES])
@pytest.mark.parametrize(
    ("files", "where", "found", "expected"),
    [
        (
            {"build": _BUILD.replace("{}", "{}, world_size")},
            f"{_UTILS}:1",
            "requires world_size",
            "(block_size or hash_block_size, caching_hash_fn)",
        ),
        (
            {"build": _BUILD.replace("_request_", "_")},
            _UTILS,
            "no get_request_block_hasher",
            "get_request_block_hasher",
        ),
        (
            {"hashing": "def hash_function(name): ...\n"},
            _HASHING,
            "no get_hash_fn_by_name",
            "get_hash_fn_by_name",
        ),
    ],
)
def test_drifted_form(tmp_path, patch_named, generator, files, where, found, expected):
    sources = _sources(tmp_path, _FORMS["0.24.0"], generator, **files)
    finding = patch_named("block_hasher").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{where}"
    assert found in finding.found
    assert expected in finding.expected


def test_module_gone(tmp_path, patch_named):
    sources = _sources(tmp_path, _FORMS["0.24.0"], _OMITS)
    (tmp_path / "vllm" / _UTILS).unlink()
    finding = patch_named("block_hasher").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert (finding.where, finding.found) == (f"{tmp_path}/vllm/{_UTILS}", "no such file")


@pytest.mark.parametrize(
    "parameters",
    ["vllm_config", "", "*, block_size, caching_hash_fn", "caching_hash_fn, block_size"],
)
def test_drifted_parameters(tmp_path, patch_named, parameters):
    sources = _sources(tmp_path, (parameters, _HASHING), _OMITS)
    finding = patch_named("block_hasher").probe(sources)
    assert finding.verdict is Verdict.UNKNOWN_FORM
    assert finding.where == f"{tmp_path}/vllm/{_UTILS}:1"


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 gives its requests a block hasher")
def test_speculators_own_requests_fail():
    """0.3.0's own loop with prefix caching on: vLLM misses the hashes of the full blocks."""
    # From 0.26 the list of hashes is indexed before its length is compared.
    error = AssertionError if vllm_version().startswith("0.16.") else IndexError
    left_out = ("prefix_caching", "none_hash", "block_hasher", "generate_loop")
    with skipping(*left_out) as module, engine(module) as generator:
        assert not hasattr(generator, "block_hasher")
        with pytest.raises(error) as raised:
            generator.generate([prompt(200, seed=1)])
        assert "cache_full_blocks" in [entry.name for entry in raised.traceback]


@pytest.mark.engine
@pytest.mark.skipif(not is_0_3(), reason="0.4 has a block_hasher")
def test_generate_fails_without_it():
    with skipping("block_hasher") as module, engine(module) as generator:
        with pytest.raises(AttributeError, match="block_hasher"):
            generator.generate([prompt(200, seed=1)])
        assert not generator.scheduler.requests


@pytest.mark.engine
@pytest.mark.parametrize(
    ("algorithm", "prefix_caching"), [("sha256", False), ("xxhash_cbor", True)]
)
def test_patched_values_are_right(monkeypatch, algorithm, prefix_caching):
    """Every request has the hashes of its full blocks, whether or not the cache uses them."""
    prompts = [prompt(n, seed=n) for n in (700, 128, 5, 127, 257)]  # no common prefix
    requests = []
    configure = _cached(algorithm, prefix_caching)
    with patched() as module, engine(module, configure=configure) as generator:
        assert callable(generator.block_hasher)
        add = generator.scheduler.add_request

        def recorded(request):
            requests.append((request, list(request.block_hashes)))
            add(request)

        monkeypatch.setattr(generator.scheduler, "add_request", recorded)
        assert_right(generator.generate(prompts), prompts)
        assert generator.scheduler.kv_cache_manager.enable_caching is prefix_caching
        # Built as EngineCore builds it: at the size the scheduler hashes at.
        size = getattr(generator.scheduler, "hash_block_size", generator.scheduler.block_size)
        assert generator.vllm_config.cache_config.block_size == size
    assert [list(request.prompt_token_ids) for request, _ in requests] == prompts
    for (request, hashes), ids in zip(requests, prompts, strict=True):
        assert len(hashes) == len(ids) // size
        assert hashes == _expected(ids, algorithm, size)
        # And it goes on hashing as the request grows, as EngineCore's does.
        request.append_output_token_ids(list(range(4, 4 + size)))
        assert len(request.block_hashes) == (len(ids) + size) // size


@pytest.mark.engine
def test_a_request_without_a_hasher_fails_where_the_cache_is_on():
    """What the injection saves every caller from, whichever speculators builds the requests."""
    error = AssertionError if vllm_version().startswith("0.16.") else IndexError
    with patched() as module, engine(module, configure=_cached("sha256", True)) as generator:
        hasher, generator.block_hasher = generator.block_hasher, None
        with pytest.raises(error):
            generator.generate([prompt(200, seed=1)])
        assert not generator.scheduler.requests
        # The failed call left the generator usable: with its hasher back, values are right.
        generator.block_hasher = hasher
        prompts = [prompt(300, seed=2)]
        assert_right(generator.generate(prompts), prompts)


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("algorithm", _ALGORITHMS)
def test_applied_by_hand_for_every_algorithm(patch_named, algorithm, size):
    """The patch alone: a generator's own configuration decides, and nothing else does."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    def constructor(self) -> None:
        cache = SimpleNamespace(prefix_caching_hash_algo=algorithm, block_size=size)
        self.vllm_config = SimpleNamespace(cache_config=cache)

    kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    module, ledger = ModuleType(GENERATOR), Ledger()
    owner = type(GENERATOR_CLASS, (), {"__init__": constructor})
    setattr(module, GENERATOR_CLASS, owner)
    patch_named("block_hasher").apply(module, ledger)
    generator = owner()
    ids = prompt(3 * size + 1, seed=size)
    vllms = kv_cache_utils.get_request_block_hasher(size, get_hash_fn_by_name(algorithm))
    hashes = list(_request(ids, generator.block_hasher).block_hashes)
    assert hashes == list(_request(ids, vllms).block_hashes) == _expected(ids, algorithm, size)
    assert len(set(hashes)) == 3
    assert generator.block_hasher(_request(ids)) == hashes
    assert generator.block_hasher(_request(ids[: size - 1])) == []
    # Another token in the first block changes every hash after it.
    other = generator.block_hasher(_request([ids[0] + 1, *ids[1:]]))
    assert not set(other) & set(hashes)
    ledger.undo()
    assert vars(owner)["__init__"] is constructor
    assert not hasattr(owner(), "block_hasher")


@pytest.mark.parametrize("algorithm", _ALGORITHMS[1:])
def test_another_algorithm_gives_other_hashes(algorithm):
    """The comparison can fail: a hasher of the wrong algorithm would be seen."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)
    ids = prompt(64, seed=3)
    assert not set(_expected(ids, algorithm, 16)) & set(_expected(ids, "sha256", 16))


@pytest.mark.skipif(is_0_3(), reason="needed for 0.3.0")
def test_declined_where_it_is_not_needed():
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = vars(owner)["__init__"]
    with patched():
        assert vars(owner)["__init__"] is before


def test_revert_restores_the_identical_object():
    with unpatched() as module:
        owner = getattr(module, GENERATOR_CLASS)
        before = vars(owner)["__init__"]
    with skipping("none_hash"):  # which wraps the same name
        assert (vars(owner)["__init__"] is before) is not is_0_3()
    assert vars(owner)["__init__"] is before
    with patched():
        assert getattr(module, GENERATOR_CLASS) is owner
    assert vars(owner)["__init__"] is before
