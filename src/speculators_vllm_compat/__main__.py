"""``python -m speculators_vllm_compat`` is the command ``speculators-vllm-compat``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
