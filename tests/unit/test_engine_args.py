"""Where the user's options enter: mistyped methods."""

from typing import get_args

import pytest

from vllm_ssd.integration.engine_args import METHOD, _refuse_typo


@pytest.mark.parametrize(
    "method", ("saguro", "Saguaro", "SAGUARO", "saguarro", "sagauro", " saguaro", "saguaros", "sagua")
)
def test_a_mistyped_method_names_the_right_one(method: str) -> None:
    """The user gets vLLM's list of methods, in which saguaro is not."""
    with pytest.raises(ValueError, match="write 'saguaro'") as error:
        _refuse_typo(method)
    assert repr(method) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "method", (None, 3, "", "ngram", "medusa", "eagle", "draft_model", "sugar", "jaguar", "eagle3")
)
def test_other_methods_are_left_to_vllm(method: object) -> None:
    """vLLM's own methods, or its own message on nonsense, are no longer reached."""
    _refuse_typo(method)


def test_no_method_of_vllm_is_taken_for_a_typo() -> None:
    """A method that vLLM adds is close to ours."""
    speculative = pytest.importorskip("vllm.config.speculative")
    names = [name for name in get_args(speculative.SpeculativeMethod) if isinstance(name, str)]
    names += [name for group in get_args(speculative.SpeculativeMethod) for name in get_args(group)]
    assert "ngram" in names
    for name in names:
        if name != METHOD:
            _refuse_typo(name)
