"""Which draft for a target: what is known of each candidate made into expected speeds and one recommendation.

Takes figures in (sizes, perplexities, agreement, times), gives figures out; knows no model and no
file. What was not measured is filled in by the laws: perplexity from size (Chinchilla), acceptance
from perplexity (SDSL), time from size (memory-bound: a forward costs what its weights cost to read).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_ssd import theory
from vllm_ssd.sdsl import scaling_law
from vllm_ssd.sdsl.scaling_law import CHINCHILLA, PUBLISHED_ACCEPTANCE
from vllm_ssd.sdsl.sizes import show_size
from vllm_ssd.theory import Seconds

MOST_DRAFTS = 8  # K up to which is searched, as far as acceptance by position is measured
BRANCHES = (4, 8, 16, 32)
_ASSUMED_MISSES = [1.0, *(0.5 / count for count in range(1, 33))]  # 0.5/F, where ranks were not measured
_SMALL_TARGET = 1e9  # the linear rule was fitted to targets of 13B to 110B, the law of α to such models as well
_WORTH_IT = 1.02  # times the speed without speculation, from which on a draft is recommended


@dataclass(frozen=True)
class Candidate:
    """A draft, and what is known of it; None where it was not measured."""

    name: str
    params: float
    same_tokenizer: bool | None = None
    perplexity: float | None = None
    measured_acceptance: float | None = None  # α at positions of the text
    by_position: Sequence[float] | None = None  # of a chain of drafts
    refused_misses: Sequence[float] | None = None  # by F = 0.., see `measuring.Agreement`
    bonus_misses: Sequence[float] | None = None
    step_seconds: Seconds | None = None  # of a draft forward by tokens


@dataclass(frozen=True)
class Target:
    """The target, likewise."""

    name: str
    params: float
    perplexity: float | None = None
    verify_seconds: Seconds | None = None  # of a target forward by tokens


@dataclass(frozen=True)
class Setting:
    """How the pair would run."""

    batch: int = 1
    overhead: float = 0.0  # seconds a round that are no forward; ignored where times are not measured
    target_devices: int = 1  # over which the target's weights are spread, where times are not measured
    draft_tokens: float = 2e12  # that models are trained on, where perplexities are not measured
    target_tokens: float = 2e12
    temperature: float | None = None  # that acceptance was measured at


@dataclass(frozen=True)
class Choice:
    """A method at its best."""

    num_drafts: int
    rate: float  # tokens a second of the batch; in verifies of one token where times are not measured
    branches: int = 0
    hit_rate: float = 0.0
    late: bool = False


@dataclass(frozen=True)
class Assessment:
    """A candidate's row in the table."""

    candidate: Candidate
    usable: bool
    ratio_to_best_size: float  # N / N_opt
    law_acceptance: float | None  # α by the law, from perplexities measured or by the law
    acceptance: list[float] | None  # by position, measured or the law's: what the speeds rest on
    sdsl: float | None  # tokens for the price of one target forward, at the best γ
    sdsl_gamma: int | None
    none: float
    sd: Choice | None
    ssd: Choice | None


@dataclass(frozen=True)
class Advice:
    """All rows, and what to do."""

    target: Target
    setting: Setting
    best_size: scaling_law.Interval  # by the linear rule
    rule_applies: bool  # the target is within reach of the targets it was fitted to
    measured: bool  # times and acceptance of all usable drafts; else the laws stand in
    assessments: list[Assessment]
    chosen: Assessment | None  # None: no draft fits, or neither measurements nor laws can tell
    sentence: str

    @property
    def any_fits(self) -> bool:
        """Whether a draft shares the target's tokenizer."""
        return any(each.usable for each in self.assessments)


def advise(target: Target, candidates: Sequence[Candidate], setting: Setting) -> Advice:
    """Assess every candidate and recommend one, or none. Raises `ValueError` for impossible sizes."""
    best_size = scaling_law.linear_rule(target.params)
    rule_applies = target.params >= _SMALL_TARGET
    assessments = [assess(target, candidate, setting) for candidate in candidates]
    usable = [each for each in assessments if each.usable]
    measured = target.verify_seconds is not None and all(_is_measured(each.candidate) for each in usable)
    best = max(usable, key=lambda each: max(each.ssd.rate, each.sd.rate), default=None)
    if best is None:
        sentence = f"None of these drafts fits {target.name}: a draft needs the target's tokenizer."
    elif measured:
        sentence = _verdict(best, target, best_size.value if rule_applies else None)
    elif rule_applies and all(scaling_law.within_reach(each.law_acceptance) for each in usable):
        sentence = f"{_guess(best, target)}\n{_assumed(target, setting)} {_better(target)}"
    else:
        best = None
        sentence = (
            f"No recommendation: nothing was measured, and for these models the law of α is a guess. {_better(target)}"
        )
    return Advice(target, setting, best_size, rule_applies, measured, assessments, best, sentence)


def _is_measured(candidate: Candidate) -> bool:
    return candidate.step_seconds is not None and candidate.measured_acceptance is not None


def assess(target: Target, candidate: Candidate, setting: Setting) -> Assessment:
    """What one draft would bring."""
    if candidate.params <= 0:
        raise ValueError(f"{candidate.name!r} has {candidate.params} parameters; it must be above 0")
    ratio = candidate.params / scaling_law.linear_rule(target.params).value
    verify = target.verify_seconds or (lambda _tokens: 1.0)
    overhead = setting.overhead if target.verify_seconds else 0.0
    none = setting.batch / (verify(setting.batch) + overhead)
    if candidate.same_tokenizer is False:
        return Assessment(candidate, False, ratio, None, None, None, None, none, None, None)
    law = _law_acceptance(target, candidate, setting)
    acceptance = list(candidate.by_position or [candidate.measured_acceptance or law])
    sdsl_alpha = min(candidate.measured_acceptance if candidate.measured_acceptance is not None else law, 0.999)
    gamma = scaling_law.best_gamma(sdsl_alpha, candidate.params, target.params)
    relative = candidate.params / target.params * setting.target_devices
    step = candidate.step_seconds or (lambda _tokens: relative)
    return Assessment(
        candidate,
        True,
        ratio,
        law,
        acceptance,
        scaling_law.throughput(sdsl_alpha, gamma, candidate.params, target.params),
        gamma,
        none,
        best_sd(acceptance, verify, step, overhead, setting.batch),
        best_ssd(candidate, acceptance, verify, step, overhead, setting.batch),
    )


def _law_acceptance(target: Target, candidate: Candidate, setting: Setting) -> float:
    x = candidate.perplexity or CHINCHILLA.perplexity(candidate.params, setting.draft_tokens)
    y = target.perplexity or CHINCHILLA.perplexity(target.params, setting.target_tokens)
    return PUBLISHED_ACCEPTANCE(x, y)


def best_sd(acceptance: Sequence[float], verify: Seconds, step: Seconds, overhead: float, batch: int) -> Choice:
    """Plain speculative decoding at its best K; K = 0 is no speculation."""
    found, rate = theory.best_num_drafts(
        lambda k: batch * theory.expected_tokens(acceptance, k),
        lambda k: theory.sd_round_seconds(verify, step, overhead, batch, k),
        MOST_DRAFTS,
    )
    return Choice(found, rate)


def best_ssd(
    candidate: Candidate, acceptance: Sequence[float], verify: Seconds, step: Seconds, overhead: float, batch: int
) -> Choice:
    """SSD at its best K and number of branches; misses wait for the draft or not, whichever gives more."""
    options = [
        _ssd(candidate, acceptance, verify, step, overhead, batch, k, branches)
        for k in range(1, MOST_DRAFTS + 1)
        for branches in BRANCHES
    ]
    return max(options, key=lambda choice: choice.rate)


def _ssd(
    candidate: Candidate,
    acceptance: Sequence[float],
    verify: Seconds,
    step: Seconds,
    overhead: float,
    batch: int,
    num_drafts: int,
    branches: int,
) -> Choice:
    hits = _hit_rate(candidate, acceptance, num_drafts, branches)
    seconds = theory.ssd_round_seconds(verify, step, overhead, batch, num_drafts, branches)
    verified = verify(batch * (1 + num_drafts)) + overhead
    tokens = theory.expected_tokens(acceptance, num_drafts)
    # A round waits if any of its rows missed; without waiting a row that missed gets its bonus token only.
    waits = (1.0 - hits**batch) * num_drafts * step(max(1.0, batch * (1.0 - hits)))
    waiting = batch * tokens / (seconds + waits)
    going_on = batch * (hits * tokens + 1.0 - hits) / seconds
    return Choice(num_drafts, max(waiting, going_on), branches, hits, late=seconds > verified)


def _hit_rate(candidate: Candidate, acceptance: Sequence[float], num_drafts: int, branches: int) -> float:
    """p = Σ P_k (1 − miss_k(F_k)): the refused positions and the last one have miss rates of their own."""
    stops = theory.stop_probabilities(acceptance, num_drafts)
    counts = theory.whole_fan_out(stops, branches, exponent=1.0)
    refused = candidate.refused_misses or _ASSUMED_MISSES
    bonus = candidate.bonus_misses or _ASSUMED_MISSES
    laws = [refused] * num_drafts + [bonus]
    return sum(stop * (1.0 - law[min(count, len(law) - 1)]) for stop, law, count in zip(stops, laws, counts))


# ---- words ----


def _verdict(best: Assessment, target: Target, best_size: float | None) -> str:
    """What to do, after measurements."""
    gain_sd, gain_ssd = best.sd.rate / best.none, best.ssd.rate / best.none
    if max(gain_sd, gain_ssd) <= _WORTH_IT:
        return (
            f"Do not speculate with these drafts: the best of them, {best.candidate.name}, would give "
            f"{max(gain_sd, gain_ssd):.2f}x of what {target.name} gives alone."
        )
    if gain_ssd < gain_sd:
        return (
            f"Take {best.candidate.name} with plain speculative decoding and {best.sd.num_drafts} drafts a round "
            f"({gain_sd:.2f}x over none): its trees would be late ({gain_ssd:.2f}x with saguaro)."
        )
    return (
        f"Take {best.candidate.name} with saguaro and num_speculative_tokens {best.ssd.num_drafts}: "
        f"{gain_ssd:.2f}x over no speculation and {gain_ssd / gain_sd:.2f}x over plain speculative decoding are "
        f"expected, because {_reason(best, best_size)}."
    )


def _guess(best: Assessment, target: Target) -> str:
    """What the laws say where nothing was measured."""
    gain_sd, gain_ssd = best.sd.rate / best.none, best.ssd.rate / best.none
    says = f"Not measured. By laws alone {best.candidate.name} would do best"
    if max(gain_sd, gain_ssd) <= _WORTH_IT:
        return f"{says}, but with {max(gain_sd, gain_ssd):.2f}x of what {target.name} gives alone: not worth it."
    if gain_ssd < gain_sd:
        how = f"plain speculative decoding and {best.sd.num_drafts} drafts a round"
        return f"{says}, with {how}: {gain_sd:.2f}x over no speculation."
    return (
        f"{says}, with saguaro and num_speculative_tokens {best.ssd.num_drafts}: {gain_ssd:.2f}x over no speculation, "
        f"{gain_ssd / gain_sd:.2f}x over plain speculative decoding."
    )


def _assumed(target: Target, setting: Setting) -> str:
    perplexities = "perplexities on the text"
    if target.perplexity is None:
        perplexities = f"perplexities that Chinchilla's law gives after {show_size(setting.target_tokens)} tokens"
    devices = "another" if setting.target_devices == 1 else f"{setting.target_devices} more"
    return (
        f"Assumed: α by SDSL's law (fitted on HellaSwag, R² 0.60) from {perplexities}; forwards that take as long as "
        f"reading the weights, the draft's on one device, the target's on {devices} of the kind; F branches miss 0.5/F."
    )


def _better(target: Target) -> str:
    how = "give the models, with --measure" if target.perplexity is None else "add --measure"
    return f"To know, {how}, or fit the law to your models first (docs/scaling_law.md)."


def _reason(chosen: Assessment, best_size: float | None) -> str:
    accepted = theory.expected_tokens(chosen.acceptance, chosen.ssd.num_drafts) - 1.0
    reason = f"{accepted:.1f} drafts of a round are accepted, {chosen.ssd.hit_rate:.0%} of the rounds hit"
    reason += ", and its trees are a little late" if chosen.ssd.late else ", and its trees are in time"
    if best_size is None:
        return reason
    if chosen.ratio_to_best_size > 4.0:
        reason += f" although it is {chosen.ratio_to_best_size:.1f} times the size that FLOPs alone would ask for"
    elif chosen.candidate.params < best_size / 4.0:
        reason += f" although FLOPs alone would afford {1.0 / chosen.ratio_to_best_size:.1f} times its size"
    return reason
