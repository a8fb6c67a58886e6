"""How much faster ``speculators-vllm-compat check`` is than ``import vllm``, side by side.

Run it in an environment with both: ``python benchmarks/check_speed.py [rounds]``. The two take
turns, so that what else the machine does falls on both; the best round of each counts.
"""

from __future__ import annotations

import subprocess
import sys
import time

IMPORT = [sys.executable, "-c", "import vllm"]
CHECK = [sys.executable, "-m", "speculators_vllm_compat", "check", "--json"]


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode > 1:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    pairs = [(seconds(IMPORT), seconds(CHECK)) for _ in range(rounds)]
    slow, fast = (min(taken) for taken in zip(*pairs, strict=True))
    print(f"import vllm {slow:.2f} s, check {fast:.2f} s, {slow / fast:.1f} times faster")


if __name__ == "__main__":
    main()
