"""One real ``vllm`` server on the CPU for the tests: started once, ended by the id of its process group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m"
START_S = 240.0


@dataclass
class Server:
    """A running server: where it is, where it logs to, and its process (the leader of its group)."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End every process of the group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def environment() -> dict[str, str]:
    """The environment of a server on runner V1, without what the tests' own process may have set."""
    wanted = {
        "HF_HUB_OFFLINE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": "specgram", "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    openmp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    if openmp.is_file():
        wanted["LD_PRELOAD"] = str(openmp)
    dropped = ("PYTHONDONTWRITEBYTECODE", "PROMETHEUS_MULTIPROC_DIR")
    return {key: value for key, value in os.environ.items() if key not in dropped} | wanted


def start(model: Path, folder: Path, options: Mapping[str, str | None]) -> Server:
    """Start a server for ``model`` and wait until it is healthy; its output goes to a file in ``folder``."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--dtype", "bfloat16", "--kv-cache-memory-bytes", str(256 << 20)]
    for name, value in options.items():
        command += [name] if value is None else [name, value]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return server
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    server.kill()
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
