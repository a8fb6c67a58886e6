"""Drift injected into copies of the installed sources: found, named, and nothing is applied."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import speculators_vllm_compat as compat
from cell import unpatched
from speculators_vllm_compat import plan
from speculators_vllm_compat.cli.report import Report, examine
from speculators_vllm_compat.detect import Package, detect
from speculators_vllm_compat.patches import PATCHES
from speculators_vllm_compat.patching import CUSTOM_WORKER, GENERATOR
from speculators_vllm_compat.switches import DRIVER

_SUBTREES = ("v1", "config", "utils", "plugins", "distributed", "worker")
_MODELS = ("model_executor/models/llama.py", "model_executor/models/interfaces.py")


class NotInThisReleaseError(Exception):
    """What a mutation changes is not there."""


Mutator = Callable[[ast.Module], None]


@dataclass(frozen=True)
class Mutation:
    """One change upstream could make.

    Attributes:
        boundary: The boundary it is about.
        kind: What kind of change it is.
        module: The file, relative to the folder of all packages.
        change: Makes it, or raises NotInThisReleaseError.
    """

    boundary: str
    kind: str
    module: str
    change: Mutator

    def __str__(self) -> str:
        return f"{self.boundary}-{self.kind}"


def _find(tree: ast.Module, qualname: str) -> tuple[list[ast.stmt], ast.AST]:
    """A definition, and the list of statements it stands in."""
    body, found = tree.body, None
    for part in qualname.split("."):
        flat = [*body]
        for statement in body:
            if isinstance(statement, ast.If | ast.Try):
                flat += statement.body
        named = [s for s in flat if getattr(s, "name", None) == part]
        if not named:
            raise NotInThisReleaseError(qualname)
        container, found = (tree.body if found is None else found.body), named[-1]
        body = found.body
    return container, found


def rename_argument(function: str, old: str, new: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        arguments = _find(tree, function)[1].args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named = [a for a in every if a.arg == old]
        if not named:
            raise NotInThisReleaseError(f"{function}({old})")
        named[0].arg = new

    return change


def require_argument(function: str, name: str = "brand_new") -> Mutator:
    def change(tree: ast.Module) -> None:
        arguments = _find(tree, function)[1].args
        arguments.kwonlyargs.append(ast.arg(name))
        arguments.kw_defaults.append(None)

    return change


def remove_argument(function: str, name: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        arguments = _find(tree, function)[1].args
        kept = [a for a in arguments.args if a.arg != name]
        if len(kept) == len(arguments.args):
            raise NotInThisReleaseError(f"{function}({name})")
        arguments.args = kept
        arguments.defaults = arguments.defaults[: len(kept)]

    return change


def swap_arguments(function: str, first: int = 0) -> Mutator:
    def change(tree: ast.Module) -> None:
        arguments = _find(tree, function)[1].args
        offset = first + (arguments.args[0].arg == "self")
        a, b = arguments.args[offset], arguments.args[offset + 1]
        arguments.args[offset], arguments.args[offset + 1] = b, a

    return change


def keyword_only(function: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        arguments = _find(tree, function)[1].args
        keep = 1 if arguments.args[0].arg == "self" else 0
        moved, arguments.args = arguments.args[keep:], arguments.args[:keep]
        arguments.kwonlyargs = [*moved, *arguments.kwonlyargs]
        arguments.kw_defaults = [None] * len(moved) + arguments.kw_defaults
        arguments.defaults = []

    return change


def rename(definition: str, new: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        _find(tree, definition)[1].name = new

    return change


def move_away(definition: str) -> Mutator:
    """To another module, without a re-export."""

    def change(tree: ast.Module) -> None:
        found = _find(tree, definition)[1]
        for node in ast.walk(tree):
            for block in ("body", "orelse"):
                statements = getattr(node, block, None)
                if isinstance(statements, list) and found in statements:
                    name = found.name
                    kept = [s for s in statements if getattr(s, "name", None) != name]
                    setattr(node, block, kept or [ast.Pass()])

    return change


def split_class(name: str) -> Mutator:
    """Into a base class with everything, and an empty class of the old name."""

    def change(tree: ast.Module) -> None:
        container, found = _find(tree, name)
        found.name = f"{name}Base"
        base = ast.Name(f"{name}Base", ast.Load())
        empty = ast.ClassDef(name, [base], [], [ast.Pass()], [])
        if sys.version_info >= (3, 12):
            empty.type_params = []
        container.insert(container.index(found) + 1, empty)

    return change


def return_pair(function: str) -> Mutator:
    """Its result, and something else beside it."""

    def change(tree: ast.Module) -> None:
        found = _find(tree, function)[1]
        found.body.append(ast.Return(ast.Constant(None)))
        for node in ast.walk(found):
            if isinstance(node, ast.Return):
                value = node.value or ast.Constant(None)
                node.value = ast.Tuple([value, ast.Constant(None)], ast.Load())
        if found.returns is not None:
            found.returns = ast.parse(f"tuple[{ast.unparse(found.returns)}, int]", mode="eval").body

    return change


def rename_field(class_name: str, old: str, new: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        for statement in _find(tree, class_name)[1].body:
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == old:
                statement.target = ast.Name(new, ast.Store())
                return
        raise NotInThisReleaseError(f"{class_name}.{old}")

    return change


def require_field(class_name: str) -> Mutator:
    def change(tree: ast.Module) -> None:
        field = ast.parse("brand_new: int").body[0]
        _find(tree, class_name)[1].body.insert(1, field)

    return change


def replace(old: str, new: str) -> Mutator:
    """A text in the normalised source."""

    def change(tree: ast.Module) -> None:
        text = ast.unparse(tree)
        if old not in text:
            raise NotInThisReleaseError(old)
        tree.body = ast.parse(text.replace(old, new)).body

    return change


_UTILS = "vllm/v1/core/kv_cache_utils.py"
_HASHING = "vllm/utils/hashing.py"
_SCHEDULER = "vllm/v1/core/sched/scheduler.py"
_OUTPUT = "vllm/v1/core/sched/output.py"
_REQUEST = "vllm/v1/request.py"
_PLUGINS = "vllm/plugins/__init__.py"
_INIT = "init_none_hash"
_EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
_ABSTRACT = "vllm/v1/executor/abstract.py"
_BACKENDS = "vllm/v1/attention/backends/utils.py"
_CACHE = "vllm/config/cache.py"
_INTERFACES = "vllm/model_executor/models/interfaces.py"
_V2 = "vllm/v1/worker/gpu/model_runner.py"
_S_GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"
_S_WORKER = "speculators/data_generation/custom_worker.py"
_CONFIG = "transformers/configuration_utils.py"
_PLAN = "get_kv_cache_config_from_groups"
_EXTENSION = "HiddenStatesWorkerExtension"
_CLASS = "VllmHiddenStatesGenerator"

MUTATIONS = [
    Mutation(boundary, kind, module, change)
    for boundary, kind, module, change in (
        # transformers
        ("pretrained_config_torch", "renamed", _CONFIG, replace("class PreTrained", "class Base")),
        (
            "attn_mask_utils",
            "helper renamed",
            "transformers/modeling_attn_mask_utils.py",
            rename("_prepare_4d_causal_attention_mask", "prepare_causal_mask"),
        ),
        # names
        (
            "imported_names",
            "class moved",
            "vllm/v1/structured_output/__init__.py",
            move_away("StructuredOutputManager"),
        ),
        (
            "imported_names",
            "class renamed",
            "vllm/sequence.py",
            rename("IntermediateTensors", "StageTensors"),
        ),
        # hashing
        ("hashing_location", "moved", _HASHING, move_away("get_hash_fn_by_name")),
        ("hashing_location", "argument added", _HASHING, require_argument("get_hash_fn_by_name")),
        ("hashing_location", "keyword only", _HASHING, keyword_only("get_hash_fn_by_name")),
        ("hashing_location", "returns a pair", _HASHING, return_pair("get_hash_fn_by_name")),
        ("none_hash", "renamed", _UTILS, rename(_INIT, "init_root_hash")),
        (
            "none_hash",
            "argument renamed",
            _UTILS,
            rename_argument(_INIT, "hash_fn", "h"),
        ),
        ("none_hash", "argument added", _UTILS, require_argument(_INIT)),
        (
            "none_hash",
            "returned instead of set",
            _UTILS,
            replace("global NONE_HASH", "global ROOT_HASH"),
        ),
        ("block_hasher", "moved", _UTILS, move_away("get_request_block_hasher")),
        ("block_hasher", "reordered", _UTILS, swap_arguments("get_request_block_hasher")),
        ("block_hasher", "argument added", _UTILS, require_argument("get_request_block_hasher")),
        ("block_hasher", "returns a pair", _UTILS, return_pair("get_request_block_hasher")),
        # planning the KV cache
        ("kv_cache_location", "moved", _UTILS, move_away("unify_hybrid_kv_cache_specs")),
        (
            "kv_cache_location",
            "renamed",
            _UTILS,
            rename("_get_kv_cache_groups_uniform_spec", "get_uniform_groups"),
        ),
        (
            "kv_cache_location",
            "argument added",
            _UTILS,
            require_argument("unify_hybrid_kv_cache_specs"),
        ),
        (
            "kv_cache_location",
            "returns its result",
            _UTILS,
            return_pair("unify_hybrid_kv_cache_specs"),
        ),
        ("kv_cache_arguments", "renamed", _UTILS, rename_argument(_PLAN, "vllm_config", "config")),
        ("kv_cache_arguments", "removed", _UTILS, remove_argument(_PLAN, "available_memory")),
        ("kv_cache_arguments", "argument added", _UTILS, require_argument(_PLAN)),
        (
            "kv_cache_layout",
            "gate renamed",
            _CACHE,
            rename("CacheConfig.get_resolved_kv_cache_layout", "resolved_layout"),
        ),
        ("kv_cache_layout", "moved", _BACKENDS, move_away("resolve_kv_cache_layout")),
        ("kv_cache_layout", "reordered", _BACKENDS, swap_arguments("resolve_kv_cache_layout")),
        ("kv_cache_layout", "returns a pair", _BACKENDS, return_pair("resolve_kv_cache_layout")),
        (
            "kv_cache_layout",
            "argument added",
            _ABSTRACT,
            require_argument("Executor.set_kv_cache_layout"),
        ),
        (
            "kv_cache_layout",
            "field renamed",
            "vllm/v1/kv_cache_interface.py",
            rename_field("KVCacheConfig", "kv_cache_layout", "layout"),
        ),
        # configuration
        (
            "scheduler_config",
            "field renamed",
            "vllm/config/scheduler.py",
            rename_field("SchedulerConfig", "max_num_seqs", "max_sequences"),
        ),
        (
            "scheduler_config",
            "field required",
            "vllm/config/scheduler.py",
            require_field("SchedulerConfig"),
        ),
        (
            "prefix_caching",
            "field renamed",
            _CACHE,
            rename_field("CacheConfig", "enable_prefix_caching", "prefix_caching"),
        ),
        (
            "prefix_caching",
            "other field renamed",
            _CACHE,
            rename_field("CacheConfig", "gpu_memory_utilization", "memory_fraction"),
        ),
        (
            "cache_block_size",
            "field renamed",
            _CACHE,
            rename_field("CacheConfig", "block_size", "tokens_per_block"),
        ),
        (
            "cache_block_size",
            "flag renamed",
            _CACHE,
            rename_field("CacheConfig", "user_specified_block_size", "explicit_block_size"),
        ),
        ("cache_block_size", "class split", _CACHE, split_class("CacheConfig")),
        (
            "memory_query",
            "asked twice",
            _S_GENERATOR,
            replace("mem_get_info()", "mem_get_info() or torch.cuda.mem_get_info()"),
        ),
        # requests and the scheduler
        (
            "request_init",
            "argument renamed",
            _REQUEST,
            rename_argument("Request.__init__", "prompt_token_ids", "token_ids"),
        ),
        (
            "request_init",
            "argument added",
            _REQUEST,
            require_argument("Request.__init__"),
        ),
        ("request_init", "class split", _REQUEST, split_class("Request")),
        (
            "request_init",
            "attribute renamed",
            _REQUEST,
            replace("self.num_computed_tokens", "self.computed"),
        ),
        ("scheduler_init", "argument added", _SCHEDULER, require_argument("Scheduler.__init__")),
        (
            "scheduler_init",
            "argument renamed",
            _SCHEDULER,
            rename_argument("Scheduler.__init__", "kv_cache_config", "cache"),
        ),
        ("scheduler_init", "class split", _SCHEDULER, split_class("Scheduler")),
        ("scheduler_init", "sizes moved", _UTILS, move_away("resolve_kv_cache_block_sizes")),
        ("scheduler_init", "sizes a triple", _UTILS, return_pair("resolve_kv_cache_block_sizes")),
        (
            "scheduler_init",
            "group's field renamed",
            "vllm/v1/kv_cache_interface.py",
            rename_field("KVCacheGroupSpec", "kv_cache_spec", "spec"),
        ),
        ("generate_loop", "reordered", _SCHEDULER, swap_arguments("Scheduler.finish_requests")),
        ("generate_loop", "renamed", _SCHEDULER, rename("Scheduler.schedule", "next_step")),
        ("generate_loop", "returns a pair", _SCHEDULER, return_pair("Scheduler.schedule")),
        (
            "generate_loop",
            "field renamed",
            _OUTPUT,
            rename_field("SchedulerOutput", "num_scheduled_tokens", "tokens"),
        ),
        # executor and workers
        (
            "worker_plugin",
            "renamed",
            _PLUGINS,
            rename("load_general_plugins", "l"),
        ),
        (
            "worker_plugin",
            "group renamed",
            _PLUGINS,
            replace("vllm.general_plugins", "vllm.plugins"),
        ),
        (
            "worker_plugin",
            "no longer loaded",
            "vllm/v1/worker/worker_base.py",
            replace("load_general_plugins()", "pass_by()"),
        ),
        (
            "worker_plugin",
            "extension renamed",
            "vllm/config/parallel.py",
            rename_field("ParallelConfig", "worker_extension_cls", "worker_mixin"),
        ),
        (
            "execute_sample",
            "argument added",
            _EXECUTOR,
            require_argument("MultiprocExecutor.execute_model"),
        ),
        (
            "execute_sample",
            "sampling renamed",
            _EXECUTOR,
            rename("MultiprocExecutor.sample_tokens", "sample"),
        ),
        (
            "execute_sample",
            "returns a pair",
            _EXECUTOR,
            return_pair("MultiprocExecutor.execute_model"),
        ),
        ("execute_sample", "class split", _EXECUTOR, split_class("MultiprocExecutor")),
        (
            "rpc_reply",
            "argument renamed",
            _EXECUTOR,
            rename_argument("MultiprocExecutor.collective_rpc", "unique_reply_rank", "rank"),
        ),
        ("rpc_reply", "another reply", _EXECUTOR, replace("responses", "answers")),
        # models
        (
            "embed_function",
            "renamed",
            "vllm/model_executor/models/llama.py",
            rename("LlamaModel.embed_input_ids", "embed"),
        ),
        (
            "language_model",
            "argument added",
            _INTERFACES,
            require_argument("SupportsMultiModal.get_language_model"),
        ),
        ("eagle3_gate", "moved", _INTERFACES, move_away("supports_eagle3")),
        (
            "model_runner_v2",
            "preparation renamed",
            _V2,
            rename("GPUModelRunner.prepare_inputs", "make_batch"),
        ),
        (
            "model_runner_v2",
            "returns a pair",
            _V2,
            return_pair("GPUModelRunner.prepare_inputs"),
        ),
        (
            "model_runner_v2",
            "field renamed",
            "vllm/v1/worker/gpu/input_batch.py",
            rename_field("InputBatch", "req_ids", "requests"),
        ),
        (
            "model_runner_v2",
            "V1 batch renamed",
            "vllm/v1/worker/gpu_model_runner.py",
            replace("self.input_batch", "self.batch"),
        ),
        (
            "decoder_layer_call",
            "method renamed",
            _S_WORKER,
            rename(f"{_EXTENSION}._get_captured_states", "captured"),
        ),
        (
            "tokenizer_remote_code",
            "loaded otherwise",
            _S_GENERATOR,
            replace("AutoTokenizer.from_pretrained", "load_tokenizer"),
        ),
        (
            "generate_loop",
            "argument renamed",
            _S_GENERATOR,
            rename_argument(f"{_CLASS}.generate", "token_ids", "prompts"),
        ),
    )
]

# Boundaries that only one line of speculators has.
_ONLY_WITH = {"eagle3_gate": "supports_eagle3", "language_model": "get_language_model"}


@pytest.fixture(scope="module")
def copies(tmp_path_factory) -> Path:
    """The files that probes may look at, of all three packages."""
    folder = tmp_path_factory.mktemp("copies")
    roots = {name: detect(name).root for name in ("vllm", "speculators", "transformers")}
    only_source = shutil.ignore_patterns("__pycache__", "*.so", "*.json", "*.h")
    for name in _SUBTREES:
        for source in (roots["vllm"] / name, roots["vllm"] / f"{name}.py"):
            if source.is_dir():
                shutil.copytree(source, folder / "vllm" / name, ignore=only_source)
            elif source.is_file():
                shutil.copy(source, folder / "vllm")
    files = [roots["vllm"] / name for name in ("__init__.py", "sampling_params.py", "sequence.py")]
    files += [roots["vllm"] / name for name in _MODELS]
    files += [roots["transformers"] / f"{n}.py" for n in ("__init__", "configuration_utils")]
    files += [roots["transformers"] / "modeling_attn_mask_utils.py"]
    for source in filter(Path.is_file, files):
        package = next(root for root in roots.values() if source.is_relative_to(root))
        target = folder / package.name / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    shutil.copytree(roots["speculators"], folder / "speculators", ignore=only_source)
    return folder


@pytest.fixture(scope="module")
def modules() -> Iterator[list[object]]:
    """speculators' real modules, imported and unpatched."""
    with unpatched():
        yield [importlib.import_module(name) for name in (GENERATOR, CUSTOM_WORKER)]


def packages(copies: Path) -> dict[str, Package]:
    """The copies, as if they were what is installed."""
    return {
        name: Package(name, copies / name, detect(name).distributions)
        for name in ("vllm", "speculators", "transformers")
    }


@contextlib.contextmanager
def mutated(copies: Path, mutation: Mutation) -> Iterator[None]:
    """The copies with one mutation in them."""
    path = copies / mutation.module
    if not path.is_file():
        pytest.skip(f"this release has no {mutation.module}")
    original = path.read_text()
    tree = ast.parse(original)
    try:
        mutation.change(tree)
    except NotInThisReleaseError as missing:
        pytest.skip(f"this release has no {missing}")
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    try:
        yield
    finally:
        path.write_text(original)


def states(report: Report) -> dict[str, tuple[str, str]]:
    return {b.id: (b.state, b.found) for b in report.boundaries}


def snapshot(modules: list[object]) -> list[dict[str, int]]:
    """Every object that a patch could have put another one in place of."""
    owners = [vars(module) for module in modules]
    owners += [vars(v) for o in owners for v in o.values() if isinstance(v, type)]
    owners += [vars(sys.modules[p.target]) for p in PATCHES if p.target in sys.modules]
    return [{name: id(value) for name, value in owner.items()} for owner in owners]


def test_the_copies_are_what_is_installed(copies):
    """Otherwise the other tests would find anything."""
    copied, installed = examine(packages(copies)), examine({})
    assert states(copied) == states(installed)
    assert {state for state, _ in states(copied).values()} <= {"as is", "patched"}
    assert not [n for n in copied.notices if n.level == "problem" and "expected" in n.found]


def test_there_are_enough_of_them():
    assert len(MUTATIONS) >= 25
    assert {m.boundary for m in MUTATIONS} == {patch.id for patch in PATCHES}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_drift_is_found_and_nothing_is_applied(mutation, copies, modules, monkeypatch):
    needle = _ONLY_WITH.get(mutation.boundary, "")
    if needle not in (copies / _S_WORKER).read_text():
        pytest.skip(f"this speculators does not use {needle}")
    with mutated(copies, mutation):
        given = packages(copies)
        report = examine(given)
        assert not report.fine
        told = [n for n in report.notices if n.level == "problem" and mutation.boundary in n.found]
        assert told, [n.found for n in report.notices]
        assert all("expect" in notice.found and notice.remedy for notice in told)

        monkeypatch.setattr(plan, "detect", given.__getitem__)
        before = snapshot(modules)
        with pytest.raises(compat.CompatError, match=mutation.boundary):
            compat.apply()
        assert snapshot(modules) == before
        assert DRIVER not in os.environ  # nor would workers be
