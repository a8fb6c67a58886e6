"""The plugin patches workers of a patched driver, and nobody else's."""

from __future__ import annotations

from fakes import run, write

CODE = """
import sys
import speculators_vllm_compat_plugin as plugin
for _ in range(2):
    plugin.register()
package = sys.modules.get("speculators_vllm_compat")
print(package is not None, package is not None and package.status().active)
print(sum(type(finder).__name__ == "ImportHooks" for finder in sys.meta_path))
"""


def test_without_a_patched_driver_nothing_is_imported(tmp_path):
    assert run(write(tmp_path), CODE, prelude=False) == "False False\n0\n"


def test_with_a_patched_driver(tmp_path):
    driver = {"_SPECULATORS_VLLM_COMPAT_DRIVER": "1"}
    assert run(write(tmp_path), CODE, prelude=False, **driver) == "True True\n1\n"


def test_a_driver_patched_by_hand_has_patched_workers(tmp_path):
    variables = {"_SPECULATORS_VLLM_COMPAT_DRIVER": "1", "SPECULATORS_VLLM_COMPAT": "off"}
    assert run(write(tmp_path), CODE, prelude=False, **variables) == "True True\n1\n"
