"""Values of the real engine against transformers on the same weights, and the evidence of it."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

import pytest
import torch

from cell import TOLERANCE, environment, speculators_version, vllm_version

# A thread pool that exists before a fork leaves the child's OpenMP waiting for ever.
torch.set_num_threads(1)

# The CPU builds' MLA kernels refuse float32; the same layers run as plain attention. The test
# of real MLA sets its own backend.
os.environ["VLLM_MLA_DISABLE"] = "1"


class Evidence:
    """Collects what was compared, and writes it when every test of the run has passed."""

    def __init__(self) -> None:
        self.cases: list[dict[str, object]] = []

    def add(self, model: str, case: str, sequences: int, largest_difference: float) -> None:
        self.cases.append(
            {
                "model": model,
                "case": case,
                "sequences": sequences,
                "largest_difference": float(f"{largest_difference:.2g}"),
            }
        )

    def write(self, path: Path) -> None:
        import transformers

        content = {
            "speculators": speculators_version(),
            "vllm": vllm_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": "cpu",
            "date": datetime.date.today().isoformat(),
            "environment": list(environment()),
            "dtype": "float32",
            "tolerance": TOLERANCE,
            "cases": self.cases,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


_evidence = Evidence()


@pytest.fixture
def evidence() -> Evidence:
    return _evidence


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the evidence where asked to, but none of a run that failed."""
    target = os.environ.get("VALUES_EVIDENCE")
    if target and exitstatus == 0 and _evidence.cases and not session.testsfailed:
        _evidence.write(Path(target))
