"""Model Runner V2 with native kernels and in Triton's interpreter: the same tokens; on a build without a seam too."""

from __future__ import annotations

import json

import pytest
from engines import OBJECT, SELF, cell, run
from pairs import Worker

pytestmark = pytest.mark.engine


def test_native_and_interpreted_kernels_decode_the_same(target_folder):
    asked = cell(SELF, OBJECT, engine={"runner": "v2"}, workload={"limit": 2, "max_tokens": 12})
    with Worker(asked) as native:
        expected = native.run()
    with Worker(asked, {"v2-on-cpu": {"native": False}}) as interpreted:
        found = interpreted.run()
    assert expected["tokens"] > 0
    assert [found[key] for key in ("texts", "tokens", "accepted")] == [
        expected[key] for key in ("texts", "tokens", "accepted")
    ]


def test_a_build_without_the_seam_runs_v2_and_interprets_only_what_has_another_source_there(target_folder, tmp_path):
    cells = {
        runner: cell(
            None, OBJECT, engine={"runner": runner, "build": "0.28.0"}, workload={"limit": 2, "max_tokens": 12}
        )
        for runner in ("v1", "v2")
    }
    found = run(cells, tmp_path)
    assert [ran.run["outcome"] for ran in found.values()] == ["ok", "ok"], found["v2"].run["reason"]
    assert list(found["v1"].requests["text"]) == list(found["v2"].requests["text"])
    interpreted = json.loads(found["v2"].run["provenance"])["interpreted_kernels"]
    assert {name.rpartition(".")[2] for name in interpreted} == {
        "_apply_write_kernel", "_compute_slot_mappings_kernel", "_gumbel_sample_kernel",
    }  # fmt: skip
