"""Training and merging models that read images, as random tiny ones of current families."""

import pytest
import vision_families
from vision_families import FAMILIES, learn


@pytest.fixture(scope="module", autouse=True)
def smolvlm():
    with vision_families.smolvlm_loads():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("vision")
    return {name: vision_families.build(name, parent) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_learns_from_images_and_merges_as_it_was_trained(folders, name, runs_dir):
    moved, checks, parity = learn(name, folders[name])
    assert moved[0] == moved[1] > 0
    assert {check.state for check in checks.values()} == {"ok"}, checks
    assert parity["kl"] < 1e-4
