"""Where drafts run: reads `draft_device` and `draft_devices`, and says which CPU cores the target leaves."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_HIGHEST_CORE = 8191  # what Linux can be built for


@dataclass(frozen=True)
class DraftDevice:
    """A torch device, and on a CPU the cores to pin the draft to."""

    name: str  # "cpu" or "cuda:1"
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As the option `draft_device` says it."""
        return f"{self.name}:{_ranges(self.cores)}" if self.cores else self.name


def use_device(name: str) -> None:
    """Make "cuda:N" the calling thread's current device; nothing to do for other names.

    Tensors know where they are. Launches of Triton kernels, graphs and events go by the thread.
    """
    if name.startswith("cuda:"):
        import torch  # not needed to read options

        torch.cuda.set_device(name)


def gpu_index(gpu_id: str, visible: str | None) -> int:
    """Which of the GPUs that a process sees has this id.

    `visible`: its CUDA_VISIBLE_DEVICES; None or "": all, by their numbers. Raises `ValueError` if it does not see it.
    """
    if not (visible or "").strip():
        return int(gpu_id)
    gpu_id, ids = gpu_id.strip(), [each.strip() for each in visible.split(",")]
    if gpu_id not in ids:
        raise ValueError(f"the draft was given the GPU {gpu_id!r}, but CUDA_VISIBLE_DEVICES is {visible!r}")
    return ids.index(gpu_id)


def parse_cores(text: str) -> tuple[int, ...]:
    """ "2-5,8" → (2, 3, 4, 5, 8). Raises `ValueError` on anything else."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a core or a range of cores")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{part!r} is not a range of cores: it ends before it begins")
        if last > _HIGHEST_CORE:
            raise ValueError(f"{part!r} is beyond any machine: cores are numbered up to {_HIGHEST_CORE}")
        cores.update(range(first, last + 1))
    return tuple(sorted(cores))


def online_cores() -> tuple[int, ...]:
    """Cores that a process of ours may be pinned to, also where a container allows only some.

    The kernel cuts a wish for all cores to what is allowed; the wish is taken back at once.
    """
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        return tuple(sorted(os.sched_getaffinity(0)))
    except OSError:
        return tuple(sorted(own))
    finally:
        os.sched_setaffinity(0, own)


def read_draft_device(setting: str, platform: str, num_gpus: int) -> DraftDevice | None:
    """Check `draft_device` and parse it; None for "auto".

    `platform`: what the target runs on, "cpu" or "cuda". Raises `ValueError` naming the option.
    """
    if setting == "auto":
        return None
    try:
        return _parse(setting, platform, num_gpus)
    except _Unknown as error:
        raise _refusal(setting, f"it must be 'auto', {error}") from None
    except ValueError as error:
        raise _refusal(setting, str(error)) from None


class _Unknown(ValueError):
    """No device at all; the message says what a device looks like."""


def _parse(setting: str, platform: str, num_gpus: int) -> DraftDevice:
    """A device that is named. Raises `ValueError` with the reason alone."""
    kind, _, index = setting.partition(":")
    if kind == "cpu" and index:
        try:
            cores = parse_cores(index)
        except ValueError as error:
            raise ValueError(f"{error}; write for example 'cpu:1' or 'cpu:2-5'") from None
        missing = sorted(set(cores) - set(online_cores()))
        if missing:
            raise ValueError(f"this machine has no core {missing[0]}; it has {_ranges(online_cores())}")
        return DraftDevice("cpu", cores)
    if kind == "cuda" and index.isdecimal():
        if platform == "cpu":
            raise ValueError("this vLLM is built for CPUs; write for example 'cpu:1'")
        if int(index) >= num_gpus:
            last = f"the last of {num_gpus} is 'cuda:{num_gpus - 1}'" if num_gpus else "no GPU is visible"
            raise ValueError(f"there is no such GPU; {last}")
        return DraftDevice(f"cuda:{int(index)}")
    raise _Unknown("'cuda:N' or 'cpu:CORES', for example 'cuda:1' or 'cpu:2-5'")


def read_draft_devices(setting: str, platform: str, num_gpus: int, num_ranks: int) -> list[DraftDevice] | None:
    """The device of each data parallel rank on this machine, "cpu:2|cpu:3"; None for "auto".

    Raises `ValueError` naming the option.
    """
    if setting == "auto":
        return None
    parts = setting.split("|")
    if len(parts) != num_ranks:
        wanted = "one device" if num_ranks == 1 else f"{num_ranks} devices joined by '|', for example 'cuda:2|cuda:3'"
        ranks = "rank" if num_ranks == 1 else "ranks"
        hint = "" if num_ranks == 1 else "; or let the ranks share a draft (draft_address)"
        raise _refusal(
            setting, f"the target has {num_ranks} data parallel {ranks} on this machine and needs {wanted}{hint}"
        )
    found = [read_draft_device(part, platform, num_gpus) or _no_auto_in_lists(setting) for part in parts]
    _check_apart(setting, found)
    return found


def read_group(settings: Sequence[str], platform: str, num_gpus: int) -> list[DraftDevice]:
    """Check `draft_devices` and parse it: a device for each part of the tree.

    Drafts may share CPU cores, and a machine with few is slow then; two drafts on one GPU are refused.
    Raises `ValueError` naming the option.
    """
    found: list[DraftDevice] = []
    for setting in settings:
        if setting == "auto":
            raise _refusal(list(settings), "'auto' does not stand in a list; name each device, or use draft_device")
        try:
            device = _parse(setting, platform, num_gpus)
        except _Unknown as error:
            raise _refusal(list(settings), f"{setting!r} must be {error}") from None
        except ValueError as error:
            raise _refusal(list(settings), f"of {setting!r}: {error}") from None
        found.append(device)
        _check_apart(list(settings), found)
    return found


def _check_apart(setting: str | list[str], found: Sequence[DraftDevice]) -> None:
    """Raise `ValueError` if two drafts would be on one GPU."""
    for device in found:
        if not device.cores and found.count(device) > 1:
            raise _refusal(setting, f"{str(device)!r} is named twice, and each draft needs a GPU of its own")


def _no_auto_in_lists(setting: str) -> DraftDevice:
    raise _refusal(setting, "'auto' stands alone; name each rank's device, or none")


def split_cores(device: DraftDevice, num_ranks: int) -> list[DraftDevice]:
    """Give each data parallel rank's draft a part of the cores. Raises `ValueError` if there are too few."""
    each = len(device.cores) // num_ranks
    if each == 0:
        raise _refusal(
            "auto",
            f"the target leaves the cores {_ranges(device.cores)} to the drafts of {num_ranks} data parallel ranks; "
            "leave one for each, or let the ranks share a draft (draft_address)",
        )
    return [DraftDevice(device.name, device.cores[i * each : (i + 1) * each]) for i in range(num_ranks)]


def choose_gpus(num_gpus: int, targets: Collection[int], num_ranks: int) -> list[DraftDevice]:
    """The first GPUs that the target leaves, one for each rank. Raises `ValueError` if there are too few.

    `targets`: the indices of its own among the `num_gpus` that are visible.
    """
    free = [index for index in range(num_gpus) if index not in targets]
    if len(free) < num_ranks:
        raise _refusal(
            "auto",
            f"the target takes {len(targets)} of {num_gpus} visible GPUs and leaves {len(free) or 'none'} for "
            f"{num_ranks} draft{'s' * (num_ranks > 1)}; show vLLM one more GPU, or set draft_device to one that it is "
            "to share, and draft_kv_cache_memory_bytes",
        )
    return [DraftDevice(f"cuda:{index}") for index in free[:num_ranks]]


def check_shared_gpus(drafts: Iterable[DraftDevice], targets: Collection[int], memory_bytes: int | None) -> None:
    """Raise `ValueError` if a draft on a GPU of the target would take what is free there, which the target needs.

    `targets`: indices of its GPUs. `memory_bytes`: the size of the draft's KV cache; None: a share of what is free.
    """
    for draft in drafts:
        if memory_bytes is None and draft.name in {f"cuda:{index}" for index in targets}:
            raise ValueError(
                "speculative_config['draft_kv_cache_memory_bytes'] is None, and the draft is to run on "
                f"{draft.name!r}, a GPU of the target: name the size of its KV cache, say 2000000000, and leave "
                "room for the draft in gpu_memory_utilization; or take another draft_device."
            )


def choose_cores(bind: str, own_affinity: Iterable[int]) -> DraftDevice:
    """The cores that the target leaves.

    `bind`: VLLM_CPU_OMP_THREADS_BIND ("auto", "nobind" or core lists by rank, "0-3|4-7");
    `own_affinity`: cores that the target's process may run on. Raises `ValueError` if none is left.
    """
    online = online_cores()
    if bind not in ("auto", "nobind", ""):
        taken = {core for part in bind.split("|") for core in parse_cores(part)}
    elif set(own_affinity) != set(online):
        taken = set(own_affinity)
    else:
        taken = set(online[:-1])  # vLLM's own choice leaves its last core to the scheduler
    left = tuple(core for core in online if core not in taken)
    if not left and len(online) == 1:
        raise _refusal("auto", "this machine has one core, which the target takes; the draft needs another")
    if not left:
        raise _refusal(
            "auto",
            f"the target takes all cores ({_ranges(online)}); leave some to the draft, for example with "
            f"VLLM_CPU_OMP_THREADS_BIND={_ranges(online[:-1])}",
        )
    return DraftDevice("cpu", left)


def _ranges(cores: Iterable[int]) -> str:
    """(0, 1, 2, 5) → "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _refusal(setting: str | list[str], reason: str) -> ValueError:
    """`setting`: of `draft_device`, or, a list, of `draft_devices`."""
    key = "draft_device" if isinstance(setting, str) else "draft_devices"
    return ValueError(f"speculative_config[{key!r}] is {setting!r}: {reason}.")
