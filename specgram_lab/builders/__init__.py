"""Engine builders: each turns a cell's spec into a real vLLM engine with its patches."""
