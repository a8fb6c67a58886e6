"""Source trees of a few lines, for probes to read."""

from __future__ import annotations

from pathlib import Path

from speculators_vllm_compat.detect import Distribution, Package
from speculators_vllm_compat.patching import Sources
from speculators_vllm_compat.source import SourceTree

# What probes look at beside the file that a test is about.
BESIDE = {
    "vllm/v1/kv_cache_interface.py": (
        "class KVCacheConfig:\n    num_blocks: int\n    kv_cache_groups: list\n"
        "    kv_cache_layout: str | None = None\n"
        "class KVCacheGroupSpec:\n    layer_names: list\n    kv_cache_spec: object\n"
    ),
    "vllm/v1/core/sched/output.py": (
        "class SchedulerOutput:\n    num_scheduled_tokens: dict\n"
        "    total_num_scheduled_tokens: int\n    scheduled_new_reqs: list\n"
        "    scheduled_cached_reqs: object\n"
        "class NewRequestData:\n    req_id: str\n    prompt_token_ids: list\n"
        "    num_computed_tokens: int\n"
        "class CachedRequestData:\n    req_ids: list\n    num_computed_tokens: list\n"
    ),
    "vllm/v1/worker/gpu_input_batch.py": "class InputBatch:\n    def req_ids(self): ...\n",
    "vllm/v1/worker/gpu_model_runner.py": (
        "class GPUModelRunner:\n    def __init__(self):\n        self.input_batch = None\n"
        "        self.input_ids = None\n    def execute_model(self, scheduler_output): ...\n"
    ),
    "vllm/model_executor/models/interfaces.py": "def supports_eagle3(model): ...\n",
    "vllm/config/parallel.py": (
        "class ParallelConfig:\n    tensor_parallel_size: int = 1\n"
        "    worker_extension_cls: str = ''\n"
    ),
}


def sources(folder: Path, files: dict[str, str], distribution: str = "vllm") -> Sources:
    """Write files below vllm/, speculators/ and transformers/, and read them as those packages."""
    for name, text in {**BESIDE, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    root = folder / "vllm"
    package = Package("vllm", root, (Distribution(distribution, "0.0.0", folder),))
    return Sources(
        SourceTree(root),
        SourceTree(folder / "speculators"),
        SourceTree(folder / "transformers"),
        package,
    )


WORKER = "speculators/data_generation/custom_worker.py"
GENERATOR = "speculators/data_generation/vllm_hidden_states_generator.py"
EXECUTOR = "vllm/v1/executor/multiproc_executor.py"
