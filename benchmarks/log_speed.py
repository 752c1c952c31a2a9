"""How fast, and in how much memory, the log reader reads: MB/s on one core for three made-up logs.

``python benchmarks/log_speed.py [--mb 256] [--repeats 3]`` prints one line a log: the median and the spread of the
repeats, and the memory that the process grew by. ``served`` is a busy server's log with a refusal every 200 lines,
``storm`` has a refusal on every line, ``pairs`` the two lines of a refused token (0.30 and later) after each other,
``rates`` acceptance on every line, ``bars`` is progress bars that no line feed ends.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path

from specgram_lab.servers.log import read_log

ACCESS = '(APIServer pid=1) INFO:     127.0.0.1:{port} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
LOAD = (
    "(APIServer pid=1) INFO 11-02 10:00:{s:02d} [loggers.py:310] Engine 000: Avg prompt throughput: 93.9 tokens/s, "
    "Avg generation throughput: 13.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.0%\n"
)
RATE = (
    "(APIServer pid=1) INFO 11-02 10:00:{s:02d} [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.50, "
    "Accepted throughput: 3.00 tokens/s, Drafted throughput: 4.00 tokens/s, Accepted: {accepted} tokens, "
    "Drafted: {drafted} tokens, Per-position acceptance rate: 0.900, 0.600, Avg Draft acceptance rate: {rate:.1f}%\n"
)
REFUSED = (
    "(EngineCore pid=12) ERROR 11-02 10:00:{s:02d} [backend_xgrammar.py:202] Failed to advance FSM for request "
    "chatcmpl-{n:012x} for tokens 271. Please file an issue.\n"
)
UNEXPECTED = (
    "(EngineCore pid=12) ERROR 11-02 10:00:{s:02d} [__init__.py:402] Unexpected: grammar terminated or rejected draft "
    "token 271 for request chatcmpl-{n:012x} during bitmask fill.\n"
)
BAR = "\rProcessed prompts:  50%|#####     | {n}/1000 [00:01<00:01, 12.3it/s, est. speed input: 1.2 toks/s]"


def content(kind: str) -> str:
    """About a megabyte of the log."""
    lines = []
    for n in range(5000):
        if kind == "storm":
            lines.append(REFUSED.format(s=n % 60, n=n))
        elif kind == "pairs":
            lines.append((UNEXPECTED if n % 2 else REFUSED).format(s=n % 60, n=n // 2))
        elif kind == "rates":
            lines.append(RATE.format(s=n % 60, accepted=n, drafted=2 * n + 2, rate=100 * n / (2 * n + 2)))
        elif kind == "bars":
            lines.append(BAR.format(n=n))
        else:
            lines.append(ACCESS.format(port=30000 + n) if n % 4 else LOAD.format(s=n % 60))
            if n % 100 == 0:
                lines.append(RATE.format(s=n % 60, accepted=30, drafted=40, rate=75))
            if n % 200 == 0:
                lines.append(REFUSED.format(s=n % 60, n=n))
    return "".join(lines)


def measure(path: Path, repeats: int) -> list[float]:
    """MB/s of each repeat by the thread's processor time: what one core does, however busy the machine."""
    speeds = []
    for _ in range(repeats):
        begin = time.thread_time()
        read_log(path)
        speeds.append(path.stat().st_size / 1e6 / (time.thread_time() - begin))
    return speeds


def main() -> None:
    """Write each log, read it a few times, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    for kind in ("served", "storm", "pairs", "rates", "bars"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "engine.log"
            block = content(kind).encode()
            with path.open("wb") as out:
                for _ in range(max(1, given.mb * 1_000_000 // len(block))):
                    out.write(block)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            speeds = measure(path, given.repeats)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            print(
                f"{kind:7} {path.stat().st_size / 1e6:6.0f} MB: median {statistics.median(speeds):6.0f} MB/s"
                f" ({min(speeds):.0f} to {max(speeds):.0f}), memory grew by {grown:.0f} MiB"
            )


if __name__ == "__main__":
    main()
