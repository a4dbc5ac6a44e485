"""Which bundles of a Ray placement group the target takes, and which one the draft.

Knows nothing about Ray or vLLM: bundles are indices with the node they are on.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Assignment:
    """Indices of bundles."""

    target: tuple[int, ...]  # by rank
    draft: int


def assign(
    bundles: Sequence[tuple[int, str]], num_ranks: int, driver_node: str, chosen: Sequence[int] = ()
) -> Assignment:
    """Spread target and draft over the bundles that have a device: (index, node id) each.

    The target stays on one node if one holds it, the driver's first; the draft joins its first rank's
    node if it can. `chosen`: the target's bundles, if the user named them. Raises `ValueError`.
    """
    nodes = dict(bundles)
    if len(nodes) <= num_ranks:
        raise ValueError(
            f"the placement group has {len(nodes)} bundles with a whole device and the target takes {num_ranks}: "
            "add one more bundle for the draft"
        )
    if missing := [index for index in chosen if index not in nodes]:
        raise ValueError(
            f"VLLM_RAY_BUNDLE_INDICES names bundle {missing[0]}, which the placement group lacks or which has no "
            f"whole device; those with one are {', '.join(map(str, sorted(nodes)))}"
        )
    target = tuple(chosen) or _of_the_target(nodes, num_ranks, driver_node)
    spare = [index for index in nodes if index not in target]
    near = [index for index in spare if nodes[index] == nodes[target[0]]]
    return Assignment(target, min(near or spare))


def _of_the_target(nodes: dict[int, str], num_ranks: int, driver_node: str) -> tuple[int, ...]:
    sizes = Counter(nodes.values())
    # A node that also has room for the draft is best, then one that holds the target.
    order = sorted(
        sizes,
        key=lambda node: (sizes[node] <= num_ranks, sizes[node] < num_ranks, node != driver_node, node),
    )
    return tuple(sorted(nodes, key=lambda index: (order.index(nodes[index]), index))[:num_ranks])
