"""What a request may ask: limits, messages, forms."""

import pickle
import re
from typing import Any

import pytest

from cedar.engine import SamplingParams
from cedar.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", -2.5),
        ("presence_penalty", float("inf")),
        ("n", 0),
        ("n", True),
        ("logprobs", 101),
        ("prompt_logprobs", -1),
        ("temperature", "'hot'"),
        ("seed", 2**63),
        ("ignore_eos", "'yes'"),
        ("stop", ("",)),
        ("stop", 3),
        ("stop_token_ids", (-1,)),
        ("logit_bias", [1, 2]),
    ],
)
def test_every_field_is_checked(field: str, value: Any) -> None:
    given_value = value.strip("'") if isinstance(value, str) else value
    with pytest.raises(RequestError, match=re.escape(f"{field} is {value}; expected")):
        SamplingParams(**{field: given_value})


@pytest.mark.parametrize("bias", [{-1: 0.0}, {"a": 1.0}, {1: float("nan")}, {1: float("inf")}])
def test_bias_entries_are_checked(bias: Any) -> None:
    with pytest.raises(RequestError, match=r"logit_bias(\[| has the key ).*expected"):
        SamplingParams(logit_bias=bias)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(top_k=-1, top_p=7.0, stop=("",), n=0)
    assert all(name in str(caught.value) for name in ("top_k", "top_p", "stop", "n is 0"))


def test_parameters_from_decoded_json() -> None:
    bias = {"7": -1.5}
    found = SamplingParams.from_mapping({"stop": ["a", "b"], "logit_bias": bias, "top_p": 1})
    assert found == SamplingParams(stop=("a", "b"), logit_bias={7: -1.5})
    assert SamplingParams.from_mapping({"stop": "ab"}).stop == ("ab",)
    with pytest.raises(RequestError, match=r"'top_kk' unknown; expected some of .*mean top_k\?"):
        SamplingParams.from_mapping({"top_kk": 3})
    with pytest.raises(RequestError, match="logit_bias has the key 'x'"):
        SamplingParams.from_mapping({"logit_bias": {"x": 1.0}})


def test_parameters_keep_their_own_copies() -> None:
    bias, stop = {1: 2.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)  # type: ignore[arg-type]
    bias[2], stop[0] = 1.0, "y"
    assert (params.logit_bias, params.stop) == ({1: 2.0}, ("x",))
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop=("x",)))
    assert pickle.loads(pickle.dumps(params)) == params
