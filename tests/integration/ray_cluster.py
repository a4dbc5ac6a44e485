"""A Ray cluster on this machine, for tests, and what can be seen of it from outside."""

import os
import time
from pathlib import Path

import psutil

SHIM = Path(__file__).with_name("ray_on_cpu")


class RayCluster:
    """Raylets on this machine that claim to have GPUs."""

    def __init__(self, *num_gpus: int) -> None:
        from ray.cluster_utils import Cluster

        before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())
        try:
            self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": num_gpus[0]})
            for count in num_gpus[1:]:
                self._cluster.add_node(num_cpus=4, num_gpus=count)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.address: str = self._cluster.address

    @staticmethod
    def environment() -> dict[str, str]:
        """Of its nodes, and of programs that use it."""
        paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "PYTHONPATH": os.pathsep.join(paths),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # by a token that `ray start` left behind half of a job goes, half does not
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def close(self) -> None:
        """End all its processes."""
        self._cluster.shutdown()


def actors(kind: str) -> list[psutil.Process]:
    """Processes of Ray actors of this class."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][0].startswith(f"ray::{kind}"):
            found.append(process)
    return found


def until(condition, what: str, tries: int = 300) -> None:
    """Wait for it, or fail with `what`; a fifth of a second a try: a clock would run on while all is paused."""
    for _ in range(tries):
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(what)
