"""Model Runner V2 with native kernels and in Triton's interpreter: the same tokens."""

from __future__ import annotations

import pytest
from engines import OBJECT, SELF, cell
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
