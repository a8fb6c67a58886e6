"""Which row of the matrix a version belongs to, as it is spelled by nightlies and local builds."""

from __future__ import annotations

import pytest

from speculators_vllm_compat import matrix
from speculators_vllm_compat.detect import parse_version

ROWS = {
    # releases, and what a distribution makes of them
    "0.11.0": "0.11.0",
    "0.11.0.post2": "0.11.0",
    "0.11.1": "0.11.1",
    "0.11.1.post2": "0.11.1",
    "0.14.1": "0.14.1",
    "0.16.0": "0.16.0",
    "0.16": "0.16.0",
    "v0.16.0": "0.16.0",
    "0.32.0": "0.32.0",
    "0.33.0": "0.33.0",
    "0.33.0.post1": "0.33.0",
    # local builds
    "0.16.0+cpu": "0.16.0",
    "0.16.0+cu129": "0.16.0",
    "0.16.0+rocm700": "0.16.0",
    "0.16.0+empty": "0.16.0",
    "0.20.2+cu130.g1a2b3c4": "0.20.2",
    "0.15.1+precompiled": "0.15.1",
    # release candidates
    "0.16.0rc0": "0.16.0",
    "0.16.0rc3": "0.16.0",
    "0.16.0-rc.1": "0.16.0",
    "0.14.1rc1": "0.14.1",
    "0.22.1rc0+cu130": "0.22.1",
    # nightlies: after a release candidate, or counted towards the next release
    "0.16.0rc1.dev5": "0.16.0",
    "0.16.0rc2.dev155+g9a8b7c6d5": "0.16.0",
    "0.16.0rc2.dev155+g9a8b7c6d5.cu129": "0.16.0",
    "0.16.1.dev0+g0123abcd": "0.16.0",
    "0.16.0.dev1": "0.16.0",
    "0.17.0.dev0": "0.17.0",
    "0.17.1.dev12+gabc": "0.17.1",
    "0.18.2.dev1": "0.18.1",
    "0.25.2.dev3+cpu": "0.25.1",
    "0.33.1.dev7+gfeedbee": "0.33.0",
    # what is in no row
    "0.10.2": None,
    "0.10.2.post2": None,
    "0.11.0.dev0": "0.11.0",
    "0.10.3.dev9": None,
    "0.34.0.dev0+g1": None,
    "0.34.0rc1": None,
    "0.34.0": None,
    "1.0.0": None,
    # what is no version
    "dev": None,
    "": None,
    "nightly": None,
    None: None,
}


@pytest.mark.parametrize(("text", "row"), ROWS.items(), ids=map(str, ROWS))
def test_row(text, row):
    version = parse_version(text)
    found = matrix.load().find(parse_version("0.4.0.1"), version)
    assert (str(found.vllm.version) if found else None) == row


def test_every_release_covers_itself_alone():
    releases = matrix.load().releases
    for release in releases:
        assert [r.version for r in releases if r.covers(release.version)] == [release.version]
