"""What makes Model Runner V2 run without a GPU: Triton's interpreter as a backend, and native kernels."""
