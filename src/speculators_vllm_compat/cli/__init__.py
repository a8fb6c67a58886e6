"""The command ``speculators-vllm-compat``."""

from __future__ import annotations

import argparse
import sys

from . import rehearse


def main() -> int:
    parser = argparse.ArgumentParser(prog="speculators-vllm-compat")
    commands = parser.add_subparsers(dest="command", required=True)
    rehearse.add_arguments(commands.add_parser("rehearse", help=rehearse.DESCRIPTION))
    return rehearse.main(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
