"""What a request may ask of saguaro: values as they come in from Python and over HTTP."""

from types import SimpleNamespace

import pytest

from vllm_ssd.integration.request_options import check, wants_drafts


def params(**extra_args) -> SimpleNamespace:
    return SimpleNamespace(extra_args=extra_args or None)


@pytest.mark.parametrize("value", (False, 0, 0.0, "false", "False", "0", " FALSE "))
def test_a_request_opts_out(value: object) -> None:
    """vLLM's server makes 0 of JSON's false; some clients send strings."""
    assert not wants_drafts(params(saguaro=value))
    check(params(saguaro=value))


@pytest.mark.parametrize("value", (True, 1, 1.0, "true", "1"))
def test_a_request_may_say_yes(value: object) -> None:
    """A truthy value is taken for an opt-out, or refused."""
    assert wants_drafts(params(saguaro=value))
    check(params(saguaro=value))


def test_nothing_said_is_yes() -> None:
    """Other extra_args switch drafts off."""
    for silent in (params(), params(other=0), SimpleNamespace(extra_args={})):
        assert wants_drafts(silent)
        check(silent)
    assert not wants_drafts(None), "a pooling request has nothing to draft"
    check(SimpleNamespace())  # PoolingParams


@pytest.mark.parametrize("value", ("off", "no", 2, -1, None, [], ["false"], {"a": 1}, ""))
def test_a_wrong_value_is_refused_at_the_door_and_harmless_behind_it(value: object) -> None:
    """It reaches the engine and raises there, which would switch drafts off for all."""
    with pytest.raises(ValueError, match=r"extra_args\['saguaro'\].* must be true or false"):
        check(params(saguaro=value))
    assert wants_drafts(params(saguaro=value))
