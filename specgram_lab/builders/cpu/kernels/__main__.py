"""Print the state of every Triton kernel of the installed vLLM as JSON, for the doctor.

Wants the environment of `specgram_lab.builders.options.interpreter`.
"""

from __future__ import annotations

import json


def main() -> None:
    """Register what is native, then say what every kernel is."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  stream and event placeholders, must come before V2's modules

    from specgram_lab.builders.cpu import interpreter, kernels

    interpreter.install()
    kernels.register()
    print(json.dumps(kernels.survey()))


if __name__ == "__main__":
    main()
