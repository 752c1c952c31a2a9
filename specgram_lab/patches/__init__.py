"""Named, reversible changes to vLLM: what each is for, what it replaces, which releases it knows."""

from specgram_lab.patches.registry import (
    Patch,
    PatchError,
    Replacements,
    activate,
    active,
    change,
    deactivate,
    get,
    names,
)

__all__ = ["Patch", "PatchError", "Replacements", "activate", "active", "change", "deactivate", "get", "names"]
