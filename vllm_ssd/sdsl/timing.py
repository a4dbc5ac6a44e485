"""How long forwards take on this machine, run by the draft server's own model code.

The target runs in the same code, so its verify times leave out what vLLM adds to a step (its
scheduler, its sampler): the caller adds an overhead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import use_device
from vllm_ssd.draft.batch import Group, causal_group, flatten
from vllm_ssd.draft.model import DraftModel

_CONTEXT = 128  # tokens that every new one attends to
_WARM_UPS = 2
_REPEATS = 9
_DISTURBED = 1.3  # times the quickest, of the median: something else runs here


@dataclass(frozen=True)
class TimeCurve:
    """Seconds of a forward by tokens: measured points, straight lines between and beyond them."""

    loads: tuple[float, ...]  # ascending
    seconds: tuple[float, ...]
    disturbed: bool = False  # the repeats differ much

    def __call__(self, load: float) -> float:
        if load > self.loads[-1] and len(self.loads) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.loads[-1] - self.loads[-2])
            return self.seconds[-1] + max(slope, 0.0) * (load - self.loads[-1])
        return float(np.interp(load, self.loads, self.seconds))


def measure(
    name: str, device: torch.device, dtype: str, loads: Sequence[int], trust_remote_code: bool = False
) -> TimeCurve:
    """Time forwards of `loads` tokens, each a row of its own after a context.

    The quickest of some repeats counts: other work on the machine only ever adds time.

    Raises `ValueError` if the model cannot run in the draft server's code.
    """
    loads = sorted(set(loads))
    config = SaguaroConfig(model=name, num_speculative_tokens=1, draft_dtype=dtype, trust_remote_code=trust_remote_code)
    try:
        use_device(str(device))
        model = DraftModel(config, device, vocab_size=1 << 30)
        model.allocate_kv_cache(None, most_useful=_CONTEXT + loads[-1])
        if device.type == "cuda":
            model.warm_up()  # a draft's forward is in graphs there
        taken = [_repeats(model, load) for load in loads]
    except (NotImplementedError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{name!r} cannot be timed ({reason}).") from error
    disturbed = sum(np.median(times) > _DISTURBED * min(times) for times in taken) > len(loads) / 3
    return TimeCurve(tuple(map(float, loads)), tuple(min(times) for times in taken), bool(disturbed))


def _repeats(model: DraftModel, load: int) -> list[float]:
    """Seconds of each repeat."""
    batch = flatten([_row(place) for place in range(load)], model.device)
    taken = []
    with torch.inference_mode():
        for repeat in range(_WARM_UPS + _REPEATS):
            _wait_for(model.device)
            began = time.perf_counter()
            model.forward(batch)
            _wait_for(model.device)
            if repeat >= _WARM_UPS:
                taken.append(time.perf_counter() - began)
    return taken


def _row(place: int) -> Group:
    """One token after the common context, in slot `_CONTEXT + place`."""
    columns = np.append(np.arange(_CONTEXT), _CONTEXT + place)
    return causal_group([place % 8], _CONTEXT, columns, columns[-1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
