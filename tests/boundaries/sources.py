"""Source trees of a few lines, for probes to read."""

from __future__ import annotations

from pathlib import Path

from speculators_vllm_compat.detect import Distribution, Package
from speculators_vllm_compat.patching import Sources
from speculators_vllm_compat.source import SourceTree


def sources(folder: Path, files: dict[str, str], distribution: str = "vllm") -> Sources:
    """Write files below vllm/, speculators/ and transformers/, and read them as those packages."""
    for name, text in files.items():
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
