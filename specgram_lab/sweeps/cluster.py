"""The executor that hands a sweep's cells to Ray: a cluster that is there, or one started on this machine.

The results folder must be the same one on every node, as must the lab's installation. Ray is an extra:
``pip install specgram-lab[ray]``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from specgram_lab.run import Ended, OutputFolderError, Progress
from specgram_lab.spec import Cell, SpecError
from specgram_lab.sweeps import worker
from specgram_lab.sweeps.definition import Resources
from specgram_lab.sweeps.executors import Following, Group, grouped, left_of

POLL_S = 0.5
LOCAL = "local"
"""Address of a Ray that is started here."""
END_S = 10
"""How long Ray's own processes may take to end."""
TRIES = 3
"""Ray gives its own processes 30 s to come up, which a busy machine may not; what was read then is in memory now."""
SCRATCH = "sgray-"
"""How the name of Ray's own folder begins, its process follows: short, as sockets in it may have 107 characters."""
STORE_BYTES = 100 << 20
"""Object store of a Ray that is started here: nothing but short texts goes through it."""
HANDED_ON = ("SPECGRAM_CACHE", "SPECGRAM_API_KEY", "VLLM_CPU_OMP_THREADS_BIND", "HF_HUB_OFFLINE")
"""Environment variables that cells on other nodes get from here."""


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster. Each asks for ``resources``.

    ``address`` is as in ``ray.init``; without one the environment variable ``RAY_ADDRESS`` is used, and where that is
    missing Ray is started on this machine for as long as the cells run.
    """

    resources: Resources = field(default_factory=Resources)
    address: str | None = None

    def __call__(self, work: Sequence[tuple[Cell, Path]], progress: Progress, ended: Ended) -> None:
        """Run the cells; see `specgram_lab.sweeps.executors`.

        Raises:
            SpecError: Ray is not installed or cannot be reached, or no node has what a cell asks for.
            OutputFolderError: a node cannot write the results.
        """
        with _connected(self.address) as ray:
            _check_room(ray, self.resources)
            task = ray.remote(worker.work).options(
                num_cpus=self.resources.cpus,
                num_gpus=self.resources.gpus,
                memory=self.resources.memory_mib << 20,
                max_retries=0,
            )
            running: dict[Any, Group] = {task.remote(worker.told(group)): group for group in grouped(work)}
            following = Following(progress, ended)
            try:
                while running:
                    through, _ = ray.wait(list(running), timeout=POLL_S)
                    following.look(list(running.values()))
                    for one in through:
                        group = running.pop(one)
                        left = left_of(group, _loss(ray, one))
                        following.look([group])
                        if left:
                            running[task.remote(worker.told(left))] = left
            finally:
                for one in running:
                    ray.cancel(one, force=True)


def _loss(ray: Any, task: Any) -> str | None:
    """How the worker of a task was lost, if it was."""
    try:
        said = ray.get(task)
    except ray.exceptions.RayTaskError as error:
        return f"the Ray worker that ran it failed: {str(error).strip().splitlines()[-1]}"
    except ray.exceptions.RayError as error:
        words = str(error).split(". ")[0]
        return f"the Ray worker that ran it was lost: {' '.join(words.split())}"
    if said:
        raise OutputFolderError(said)
    return None


def _check_room(ray: Any, resources: Resources) -> None:
    """Refuse what would wait for ever."""
    asked = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory_mib << 20}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= amount for name, amount in asked.items()) for node in nodes):
        return
    has = "; ".join(
        f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs, {int(node.get('memory', 0)) >> 20} MiB"
        for node in nodes
    )
    raise SpecError(
        f"a cell asks for {resources.cpus} CPUs, {resources.gpus} GPUs and {resources.memory_mib} MiB,"
        f" no node of the Ray cluster has them ({has})"
    )


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise SpecError("the executor ray needs the package ray: pip install 'specgram-lab[ray]'") from None
    where = address or os.environ.get("RAY_ADDRESS") or LOCAL
    variables = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    before = set(psutil.Process().children(recursive=True))
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", ignore_cleanup_errors=True) as scratch:
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES, "_temp_dir": scratch}
        for tries_left in reversed(range(TRIES if where == LOCAL else 1)):
            try:
                ray.init(
                    where, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": variables},
                    **(own if where == LOCAL else {}),
                )  # fmt: skip
                _keep_signals(handlers)
                break
            except Exception as error:  # noqa: BLE001  Ray raises a bare one where it does not come up in time
                _end(ray, before)
                if not tries_left:
                    raise SpecError(f"Ray at {where} cannot be used: {' '.join(str(error).split())}") from None
        try:
            yield ray
        finally:
            _end(ray, before)


def clean_up_after_the_killed() -> None:
    """Remove the scratch folders of runners that are no more; they lie where Ray's sockets have short names."""
    for path in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        pid = path.name.removeprefix(SCRATCH).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _keep_signals(handlers: dict[signal.Signals, Any]) -> None:
    """What a signal does is for the runner to say; Ray puts a handler of its own in."""
    if threading.current_thread() is threading.main_thread():
        for one, handler in handlers.items():
            signal.signal(one, handler)


def _end(ray: Any, before: set[psutil.Process]) -> None:
    """Shut Ray down, and wait until what it started here is gone, which it does not do itself."""
    own = [one for one in psutil.Process().children(recursive=True) if one not in before]
    ray.shutdown()
    _, alive = psutil.wait_procs(own, timeout=END_S)
    for one in alive:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(alive, timeout=END_S)
