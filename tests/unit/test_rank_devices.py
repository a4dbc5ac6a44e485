"""Drafts of data parallel ranks, on machines that are made up."""

import pytest

from vllm_ssd import devices
from vllm_ssd.devices import DraftDevice, read_draft_devices, split_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "online_cores", lambda: tuple(range(8)))


def test_each_rank_has_a_device() -> None:
    """Ranks get each other's devices, or one of them none."""
    found = read_draft_devices("cpu:2|cpu:3,5", "cpu", 0, 2)
    assert found == [DraftDevice("cpu", (2,)), DraftDevice("cpu", (3, 5))]
    assert read_draft_devices("cuda:2|cuda:3", "cuda", 4, 2) == [DraftDevice("cuda:2"), DraftDevice("cuda:3")]
    assert read_draft_devices("cuda:1", "cuda", 2, 1) == [DraftDevice("cuda:1")]
    assert read_draft_devices("auto", "cpu", 0, 2) is None


@pytest.mark.parametrize(
    ("setting", "num_ranks", "words"),
    (
        ("cpu:1", 2, "2 data parallel ranks.*'cuda:2|cuda:3'.*draft_address"),
        ("cpu:1|cpu:2", 1, "1 data parallel rank on.*needs one device"),
        ("cpu:1|cpu:9", 2, "no core 9"),
        ("cpu:1|auto", 2, "'auto' stands alone"),
        ("cuda:1|cuda:1", 2, "'cuda:1' is named twice"),
    ),
)
def test_refusals(setting: str, num_ranks: int, words: str) -> None:
    """Two drafts land on one device without a word."""
    with pytest.raises(ValueError, match=f"draft_device.*{words}"):
        read_draft_devices(setting, setting.partition(":")[0], 4, num_ranks)


def test_cores_are_split() -> None:
    """Drafts of two ranks are pinned to the same cores."""
    left = DraftDevice("cpu", (3, 4, 5, 6, 7))
    assert [device.cores for device in split_cores(left, 2)] == [(3, 4), (5, 6)]
    with pytest.raises(ValueError, match="3-7 to the drafts of 6.*draft_address"):
        split_cores(left, 6)
