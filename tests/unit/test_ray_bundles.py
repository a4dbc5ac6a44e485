"""Which bundles the target takes and which the draft, on clusters that are made up."""

import pytest

from vllm_ssd.integration.ray_bundles import Assignment, assign


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "driver", "chosen", "expected"),
    (
        ("aa", 1, "a", (), Assignment((0,), 1)),
        ("aaa", 2, "a", (), Assignment((0, 1), 2)),
        ("ab", 1, "a", (), Assignment((0,), 1)),
        ("ab", 1, "b", (), Assignment((1,), 0)),
        ("abb", 2, "a", (), Assignment((1, 2), 0)),  # the target on one node, though not the driver's
        ("baaab", 2, "b", (), Assignment((1, 2), 3)),  # on a node that also has room for the draft
        ("abab", 2, "b", (), Assignment((1, 3), 0)),
        ("abc", 2, "c", (), Assignment((2, 0), 1)),  # spread over nodes, as it must
        ("aaab", 2, "b", (1, 2), Assignment((1, 2), 0)),
        ("aaab", 2, "b", (3, 0), Assignment((3, 0), 1)),
    ),
)
def test_assignments(nodes: str, num_ranks: int, driver: str, chosen: tuple, expected: Assignment) -> None:
    """Target and draft get the same bundle, or the target is torn apart without need."""
    assert assign(list(enumerate(nodes)), num_ranks, driver, chosen) == expected


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "chosen", "words"),
    (
        ("aa", 2, (), "has 2 bundles with a whole device and the target takes 2: add one more"),
        ("aaa", 2, (0, 7), "names bundle 7, .* those with one are 0, 1, 2"),
    ),
)
def test_refusals(nodes: str, num_ranks: int, chosen: tuple, words: str) -> None:
    """A start waits for a bundle that is not there."""
    with pytest.raises(ValueError, match=words):
        assign(list(enumerate(nodes)), num_ranks, "a", chosen)


def test_bundles_without_a_device_are_left_alone() -> None:
    """A bundle for CPUs only is taken for a device."""
    assert assign([(1, "a"), (3, "a")], 1, "a") == Assignment((1,), 3)
