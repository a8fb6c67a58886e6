"""Extracts hidden states from a tiny model on the CPU, without the patches and with them.

    python dev.py demo

Run by that command in an environment that has vLLM's CPU build and a speculators release. The
model has random weights and is made on the spot; the values are compared with transformers'.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

LAYERS = [1, 3, 4, 5]
LENGTHS = [200, 1, 15, 16, 17, 700, 30, 45, 5, 90, 60, 12]
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


def extract(folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What a training team's script does."""
    module = importlib.import_module(GENERATOR)
    model_config = module.ModelConfig
    # dtype="auto" would run the float32 model in bfloat16; here exact values are wanted.
    module.ModelConfig = lambda **kwargs: model_config(**{**kwargs, "dtype": "float32"})
    generator = module.VllmHiddenStatesGenerator(
        str(folder), layer_ids=LAYERS, max_model_len=1024, gpu_memory_utilization=0.1
    )
    results: list[dict[str, Any]] = generator.generate(prompts)
    del generator
    return results


def report(results: list[dict[str, Any]], folder: Path) -> float:
    """Print a line for each sequence; returns the largest difference from transformers."""
    import tiny_models

    reference = tiny_models.Reference(folder)
    worst = 0.0
    print(f"\n{'sequence':>8} {'tokens':>6}  {'layers':14} {'shape':12} largest difference")
    for index, result in enumerate(results):
        difference = tiny_models.largest_difference([result], reference, LAYERS)
        worst = max(worst, difference)
        shape = list(result["hidden_states"][0].shape)
        tokens = len(result["input_ids"])
        print(f"{index:8} {tokens:6}  {LAYERS!s:14} {shape!s:12} {difference:.1e}")
    print(f"\nlargest difference from transformers, float32: {worst:.1e}")
    return worst


def unpatched(folder: Path) -> None:
    """The same extraction in a process without the patches: show how it ends."""
    print("\n== without speculators_vllm_compat", flush=True)
    command = [sys.executable, __file__, "unpatched", str(folder)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "SPECULATORS_VLLM_COMPAT": "off"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in ended.stderr.strip().splitlines() if line]
    print("\n".join(lines[-3:]))
    print(f"exit status {ended.returncode}")


def main() -> int:
    import tiny_models

    # vLLM tells a lot while it starts; here the table is what matters.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=UserWarning)
    prompts = [tiny_models.prompt(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    if sys.argv[1:2] == ["unpatched"]:
        results = extract(Path(sys.argv[2]), prompts)
        return int(report(results, Path(sys.argv[2])) > 1e-4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_models.build("llama", Path(scratch))
        unpatched(folder)
        print("\n== with speculators_vllm_compat", flush=True)
        import speculators_vllm_compat

        status = speculators_vllm_compat.status()
        needed = [patch.id for patch in status.patches if patch.verdict == "needed"]
        print(f"{status.speculators} on {status.vllm}: {len(needed)} patches, {status.matrix}")
        results = extract(folder, prompts)
        right = report(results, folder) < 1e-4
        in_order = [result["input_ids"].tolist() for result in results] == prompts
        print(f"in the order asked for: {'yes' if in_order else 'NO'}")
    return int(not (right and in_order))


if __name__ == "__main__":
    sys.exit(main())
