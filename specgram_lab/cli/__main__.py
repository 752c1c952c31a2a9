"""``python -m specgram_lab.cli``."""

from specgram_lab.cli import main

main()
