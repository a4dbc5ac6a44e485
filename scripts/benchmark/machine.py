"""Where a benchmark runs: cores, environment variables, hardware facts. Knows no engine."""

import contextlib
import os
import platform
import time
from pathlib import Path

import psutil


def has_gpu() -> bool:
    """Whether torch sees an accelerator."""
    import torch

    return torch.cuda.is_available()


def cpu_cores(cores: str) -> tuple[int, ...]:
    """The cores of a convention: "target" is the first this process may use, "all" is every one."""
    allowed = sorted(os.sched_getaffinity(0))
    return tuple(allowed[:1] if cores == "target" else allowed)


def draft_device() -> str:
    """Saguaro's draft on a CPU: every core but the target's."""
    first, *rest = cpu_cores("all")
    if not rest:
        raise ValueError(f"saguaro needs a core for the draft besides core {first}, the only one there is")
    return "cpu:" + ",".join(map(str, rest))


def environment(cores: tuple[int, ...] | None) -> dict[str, str]:
    """Environment of a worker pinned to these cores; None: a machine with GPUs."""
    scripts = str(Path(__file__).resolve().parent.parent)
    paths = [scripts, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"VLLM_LOGGING_LEVEL": "WARNING", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if cores is not None:
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # EngineCore would poll on the draft's core
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(len(cores)),
        }
    return env


def inherited_settings() -> dict[str, str]:
    """What the caller's environment tells vLLM and its threads, such as an OpenMP library in LD_PRELOAD."""
    prefixes = ("LD_PRELOAD", "OMP_", "KMP_", "GOMP_", "VLLM_", "CUDA_VISIBLE_DEVICES")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def hardware() -> dict[str, str | int | list[str]]:
    """What the machine is, in words."""
    facts: dict[str, str | int | list[str]] = {
        "cpu": _cpu_name(),
        "cores": len(cpu_cores("all")),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.platform(),
    }
    if has_gpu():
        import torch

        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def busy_shares(pids: list[int], seconds: float) -> tuple[dict[int, float], float]:
    """Share of a core taken, while this process sleeps, by each of these with its children, and by all others."""
    before, all_before = {pid: _cpu_seconds(pid) for pid in pids}, _busy_seconds()
    time.sleep(seconds)
    shares = {pid: (_cpu_seconds(pid) - before[pid]) / seconds for pid in pids}
    return shares, max(0.0, (_busy_seconds() - all_before) / seconds - sum(shares.values()))


def _cpu_seconds(pid: int) -> float:
    process, total = psutil.Process(pid), 0.0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
            times = member.cpu_times()
            total += times.user + times.system
    return total


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
