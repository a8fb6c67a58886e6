"""Values on a GPU: every tiny model against transformers on the same weights, a line each.

    python tools/gpu_values.py --runner v2 --evidence evidence/0.4.0.1-0.26.0-v2.json

Runs in an environment that has vLLM for CUDA, a speculators release and this package
installed. ``--runner`` chooses vLLM's model runner. Exit status 1 when a value is off.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

# bfloat16 has 8 bits of mantissa: two kernels that round at other places end up a few units
# apart, over six layers. Rows given to the wrong token differ by more than half of their norm.
RELATIVE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

CASES: dict[str, list[int]] = {
    "mixed lengths": [700, 1, 200, 15, 17, 16],
    "12 sequences": [3 + (7 * index) % 40 for index in range(12)],
    "40 sequences": [5 + (11 * index) % 60 for index in range(40)],
    "longest first": [300, 200, 100, 50, 25, 12, 6, 3, 1],
}


def relative_difference(results: list[dict[str, Any]], reference: Any, layers: list[int]) -> float:
    """The largest, over rows, of the norm of the difference over the norm of the reference."""
    worst = 0.0
    for result in results:
        expected = reference(result["input_ids"].tolist(), layers)
        for found, wanted in zip(result["hidden_states"], expected, strict=True):
            off = (found.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)
            worst = max(worst, off.max().item() if off.isfinite().all() else float("inf"))
    return worst


def run(model: str, dtype: str, runner: str) -> tuple[list[dict[str, Any]], str]:
    """Every case of one model; returns the differences and the runner's class."""
    import cell
    from tiny_models import prompt

    rows = []
    with (
        cell.patched() as module,
        cell.engine(
            module, model, dtype=dtype, start_method="spawn", max_num_batched_tokens=1024
        ) as generator,
    ):
        found = generator.executor.collective_rpc(_runner_class)
        for offset, (case, lengths) in enumerate(CASES.items()):
            prompts = [prompt(n, seed=1000 * offset + i) for i, n in enumerate(lengths)]
            results = generator.generate(prompts)
            assert [r["input_ids"].tolist() for r in results] == prompts
            worst = relative_difference(results, cell.reference(model), cell.LAYERS)
            rows.append(
                {
                    "model": model,
                    "case": f"{case}, {dtype}, runner {runner}",
                    "sequences": len(prompts),
                    "largest_difference": float(f"{worst:.2g}"),
                }
            )
    return rows, found[0]


def _runner_class(worker: Any) -> str:
    return f"{type(worker.model_runner).__module__}.{type(worker.model_runner).__name__}"


def main() -> int:
    import tiny_models

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runner", choices=["v1", "v2"], required=True)
    parser.add_argument("--models", nargs="*", default=list(tiny_models.CONFIGS))
    parser.add_argument("--dtype", choices=list(RELATIVE_TOLERANCE), default="float32")
    parser.add_argument("--evidence", type=Path)
    arguments = parser.parse_args()
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if arguments.runner == "v2" else "0"
    os.environ["SPECULATORS_VLLM_COMPAT"] = "on"
    # vLLM's Triton kernels multiply float32 in TF32 unless told otherwise: 4e-3 off, and with a
    # mixture of experts enough to send a token to another one.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    if arguments.dtype == "float32":
        os.environ["VLLM_MLA_DISABLE"] = "1"  # the MLA kernels take bfloat16 only
    import torch
    import transformers

    import speculators_vllm_compat  # noqa: F401 - switched on for this process and its workers
    from cell import speculators_version, vllm_version

    tolerance, cases, failed = RELATIVE_TOLERANCE[arguments.dtype], [], False
    for model in arguments.models:
        try:
            rows, runner = run(model, arguments.dtype, arguments.runner)
        except Exception as error:  # the other models still run
            print(f"{model:14} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            failed = True
            continue
        worst = max(row["largest_difference"] for row in rows)
        failed |= worst > tolerance
        verdict = "ok" if worst <= tolerance else "WRONG"
        print(f"{model:14} {verdict} {worst:.1e} relative, {len(rows)} cases, {runner}", flush=True)
        cases += rows
    if arguments.evidence and not failed:
        content = {
            "speculators": speculators_version(),
            "vllm": vllm_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(),
            "date": datetime.date.today().isoformat(),
            "dtype": arguments.dtype,
            "tolerance": tolerance,
            "cases": cases,
        }
        arguments.evidence.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
