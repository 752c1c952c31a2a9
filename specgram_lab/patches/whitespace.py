"""The patch ``max-whitespace``: at most so many blanks between two tokens of JSON (vllm#44619, open).

xgrammar's JSON grammars allow blanks without end, so a model that likes them can fill its answer with them. xgrammar
can bound them (0.2.4 and later), no vLLM up to 0.33.0 says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from specgram_lab.patches.registry import Patch, Replacements

_BACKEND = "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend"
DEFAULT = 8
"""As vllm#44619 proposes."""


def bound(changes: Replacements, options: Mapping[str, Any]) -> None:
    """Option ``count``: blanks in a row."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    count = int(options.get("count", DEFAULT))

    def post_init(self: Any) -> None:
        original(self)
        if not self.disable_any_whitespace:
            compiler = self.compiler
            compiler.compile_json_schema = partial(compiler.compile_json_schema, max_whitespace_cnt=count)

    original = changes.set(XgrammarBackend, "__post_init__", post_init)


PATCHES = {
    "max-whitespace": Patch(
        "max-whitespace",
        "bounds the blanks between the tokens of JSON (vllm#44619)",
        (f"{_BACKEND}.__post_init__", f"{_BACKEND}.compile_grammar"),
        bound,
    )
}
