"""Scenarios of the simulator whose inputs come from arithmetic on hardware and model sizes.

Seconds of a forward: weights read once from memory at 85 % of its bandwidth, and a fixed time for
each layer (kernel launches; with tensor parallelism two all-reduces of some 15 µs). The constants
are the same for both pairs. One input comes from published results: the acceptance rate is the one
that gives *plain SD* its published gain over no speculation. What SSD adds to that comes out.
"""

from dataclasses import dataclass

from vllm_ssd.simulator import Scenario
from vllm_ssd.theory import StepTime

_BYTES = 2  # of a weight, bfloat16
_BANDWIDTH_SHARE = 0.85  # of the memory bandwidth that large reads reach
_LAYER_ALONE = 20e-6  # seconds a layer besides its weights, one GPU
_LAYER_PARALLEL = 50e-6  # the same with tensor parallelism
_HOST = 2e-3  # seconds a round: scheduling, sampling, messages, in Python
_DRAFT_HOST = 1e-3  # seconds a draft step: sampling, masks, launch of a CUDA graph
_TOKEN = 20e-6  # seconds of a verify that a further token adds
_BRANCH = 14e-6  # seconds of a draft step that a further branch adds: (35.3 − 21.1) ms / 7 steps / 147 branches
_MISS_AT_ONE = 0.5  # a single candidate misses half of the outcomes; falls as 1/F from there


@dataclass(frozen=True)
class Gpu:
    """What the arithmetic needs of a GPU."""

    name: str
    bandwidth: float  # bytes a second


H100 = Gpu("H100 SXM", 3.35e12)


@dataclass(frozen=True)
class Preset:
    """A scenario, where its inputs come from, and what was published for it."""

    about: str
    inputs: tuple[str, ...]  # one sentence each
    scenario: Scenario
    over_sd: float  # published
    over_none: float  # published


def forward_seconds(params: float, layers: int, gpu: Gpu, gpus: int) -> float:
    """Seconds of a forward over one token; `params` without the rows of the embedding that are not read."""
    layer = _LAYER_PARALLEL if gpus > 1 else _LAYER_ALONE
    return params * _BYTES / (gpus * gpu.bandwidth * _BANDWIDTH_SHARE) + layers * layer


def _preset(
    pair: str,
    target: tuple[float, int],
    draft: tuple[float, int],
    acceptance: float,
    k: int,
    fan_out: int,
    over: tuple[float, float],
) -> Preset:
    """`target`, `draft`: parameters and layers; `over`: published SSD over SD, SSD over none."""
    branches = fan_out * (k + 1)
    verify = StepTime(forward_seconds(*target, H100, gpus=4), _TOKEN)
    step = StepTime(forward_seconds(*draft, H100, gpus=1) + _DRAFT_HOST, _BRANCH)
    scenario = Scenario(
        verify=verify,
        draft=step,
        acceptance=acceptance,
        num_drafts=k,
        sd_num_drafts=k,
        overhead=_HOST,
        branches=branches,
        miss_at_one=_MISS_AT_ONE,
        waits_for_tree=True,
    )
    inputs = (
        f"target forward {1e3 * verify.base:.1f} ms: {target[0] / 1e9:g}B bfloat16 weights over 4 {H100.name} at "
        f"{_BANDWIDTH_SHARE:.0%} of {H100.bandwidth / 1e12:g} TB/s, {target[1]} layers of {1e6 * _LAYER_PARALLEL:g} µs",
        f"host {1e3 * _HOST:g} ms a round (Python engine); each further token of a verify {1e6 * _TOKEN:g} µs",
        f"draft step {1e3 * step.base:.1f} ms on one {H100.name}: {draft[0] / 1e9:g}B weights, {draft[1]} layers of "
        f"{1e6 * _LAYER_ALONE:g} µs, {1e3 * _DRAFT_HOST:g} ms of host; each further branch {1e6 * _BRANCH:g} µs",
        f"K {k} and {branches} branches ({fan_out} a position), as in the reference outputs of the paper's engine",
        f"acceptance {acceptance:g}: from plain SD's published {over[1] / over[0]:.2f}x over no speculation",
        f"one candidate misses {_MISS_AT_ONE:.0%} of the outcomes, F candidates {_MISS_AT_ONE:g}/F (assumed)",
    )
    return Preset(pair, inputs, scenario, *over)


PRESETS = {
    "llama-70b": _preset("Llama-3.1-70B, Llama-3.2-1B", (70.6e9, 80), (1.24e9, 16), 0.89, 6, 3, (1.58, 4.68)),
    "qwen3-32b": _preset("Qwen3-32B, Qwen3-0.6B", (32.8e9, 64), (0.6e9, 28), 0.68, 4, 2, (1.49, 2.29)),
}
