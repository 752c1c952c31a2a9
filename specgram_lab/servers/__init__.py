"""A running server seen from outside: its answers, its metrics, its log. Neither vLLM nor torch is imported."""
