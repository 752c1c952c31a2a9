"""The public reports as runnable cases: what each file says, its runs on installed builds, and what came out."""

from specgram_lab.cases.definition import FOLDER, Case, Run, load, names

__all__ = ["FOLDER", "Case", "Run", "load", "names"]
