"""Adaptive verification: cost curves, the tables of its choices, replay under other budgets, figures."""
