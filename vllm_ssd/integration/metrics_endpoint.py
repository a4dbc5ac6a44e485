"""Where the figures of saguaro engines join vLLM's `/metrics` and `LLM.get_metrics`.

vLLM with several API servers sets PROMETHEUS_MULTIPROC_DIR, and each of them serves what lies in
that folder. Otherwise it serves the registry of the process that configured the engine: there a
collector reads a folder of our own. Either way an engine's worker writes into the folder.
"""

import functools
import os
import tempfile
from collections.abc import Iterable

from prometheus_client import REGISTRY, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_ssd.transport import directory_prefix


def metrics_directory() -> str:
    """The folder for the figures of engines that this process configures."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR") or _registered_folder()


@functools.cache
def _registered_folder() -> str:
    folder = _Folder()
    REGISTRY.register(folder)
    return folder.path


class _Folder:
    """A folder that goes with this process, and the collector of what lies in it.

    Has no `_name`, by which vLLM would take it for one of its own metrics and unregister it.
    """

    def __init__(self) -> None:
        prefix = f"{directory_prefix()}metrics-"
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.path = self._folder.name

    def collect(self) -> Iterable[Metric]:
        """The metrics of all engines that write here; none if the folder was removed."""
        return MultiProcessCollector(None, self.path).collect() if os.path.isdir(self.path) else ()
