"""The ``vllm.general_plugins`` entry point, by which worker processes are patched.

vLLM loads it in every process it starts, for every user of vLLM in the environment. It lies
outside the package because importing the package switches the patches on, which is asked for
only where the driver has done so.
"""

import os


def register() -> None:
    """Switch the patches on in a worker whose driver is patched; do nothing elsewhere."""
    if "_SPECULATORS_VLLM_COMPAT_DRIVER" in os.environ:
        import speculators_vllm_compat

        # By hand: the driver may have been patched by hand, with the switch for imports off.
        speculators_vllm_compat.apply()
