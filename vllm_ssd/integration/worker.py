"""vLLM's workers, with our runner in them."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner, gpu_worker

from vllm_ssd.integration.v1_runner import SaguaroRunner, with_saguaro


class _SaguaroWorker:
    """What both workers add."""

    def get_saguaro_stats(self) -> dict[str, float | bool] | None:
        """Totals, on the rank that talks to the draft; for `vllm_ssd.get_stats`."""
        return self.model_runner.drafter.stats()

    def get_saguaro_report(self) -> dict[str, Any] | None:
        """What the draft measured and decided, on the same rank; for `vllm_ssd.get_report`."""
        return self.model_runner.drafter.report()

    def shutdown(self) -> None:
        """End the draft with the engine."""
        if (runner := getattr(self, "model_runner", None)) is not None:
            runner.drafter.close()
        super().shutdown()


class SaguaroGPUWorker(_SaguaroWorker, gpu_worker.Worker):
    """A GPU worker."""

    def init_device(self) -> None:
        """Make the device and our runner."""
        with _runner_exchanged(gpu_model_runner, "GPUModelRunner"):
            super().init_device()
        _check_runner(self.model_runner)


if current_platform.is_cpu():
    from vllm.v1.worker import cpu_worker

    from vllm_ssd.integration import cpu_mends

    class SaguaroCPUWorker(_SaguaroWorker, cpu_worker.CPUWorker):
        """A CPU worker."""

        def init_device(self) -> None:
            """Make the device and our runner."""
            cpu_mends.apply()
            with _runner_exchanged(cpu_worker, "CPUModelRunner"):
                super().init_device()
            _check_runner(self.model_runner)


@contextlib.contextmanager
def _runner_exchanged(module: Any, name: str) -> Iterator[None]:
    """While this holds, `module.name` is the runner with saguaro."""
    original = getattr(module, name)
    setattr(module, name, with_saguaro(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _check_runner(runner: Any) -> None:
    if not isinstance(runner, SaguaroRunner):
        raise RuntimeError(
            f"saguaro: vLLM chose the runner {type(runner).__module__}.{type(runner).__name__}; "
            "method 'saguaro' runs on the V1 runner: unset VLLM_USE_V2_MODEL_RUNNER"
        )
