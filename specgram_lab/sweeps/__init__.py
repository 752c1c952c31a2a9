"""Grids of cells that end in a full table: planned, run, resumed, collected, compared."""
