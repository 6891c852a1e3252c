"""What ranks tell each other, and what they make of it."""

from __future__ import annotations

import itertools
import json

import pytest

from cbtriton.distributed import (
    Action,
    Arrivals,
    Ending,
    Ranks,
    Wishes,
    _decoded,
    _decoded_request,
    _encoded,
    _encoded_request,
    _turn,
)
from cbtriton.plan import SampledToken, StepResult
from cbtriton.request import (
    HostProcessing,
    LogprobParams,
    ProcessorParams,
    Request,
    RuleKind,
    SamplingParams,
    StopRules,
    TokenRule,
)
from cbtriton.stopping import StopDecision


def nothing(request_id: str) -> Request:
    raise AssertionError(request_id)


def request(**fields: object) -> Request:
    rules = (TokenRule(RuleKind.FORCE, 5, (1, 2), None, 0.1), TokenRule(RuleKind.BIAS, 7, (), 3, -1e-30))
    processors = ProcessorParams(repetition_penalty=1.1, rules=rules, decay_start=9)
    sampling = SamplingParams(
        0.7, 5, 0.9, seed=2**63 - 1, processors=processors, logprobs=LogprobParams("raw", 3), prompt_logprobs=True
    )
    stop = StopRules(4, frozenset({7, 2}), ((1, 2), (3,)), ("a\u00e9", "\N{GRINNING FACE}"))
    return Request("name", [1, 2, 3], sampling, stop, streaming=True, cache_salt="salt", parent_id="parent", **fields)


def test_requests_arrive_as_they_were():
    sent = request(is_pin=True, record_timestamps=True)
    got = _decoded_request(json.loads(json.dumps(_encoded_request(sent))), nothing)
    names = (
        "request_id",
        "prompt_ids",
        "sampling",
        "stop",
        "streaming",
        "record_timestamps",
        "cache_salt",
        "parent_id",
    )
    for name in (*names, "is_pin"):
        assert getattr(got, name) == getattr(sent, name), name
    assert type(got.sampling.processors.rules[0].kind) is RuleKind


def test_results_and_decisions_arrive_as_they_were():
    tokens = (
        SampledToken(3, -0.1, None, {3: -0.1, 9: -2.5}),
        SampledToken(0, None, "no token is left"),
        SampledToken(1, float("-inf")),
    )
    for sent in (StepResult(tokens, ("a",), ((-0.5, -1 / 3), ())), StopDecision("eos", 3), StopDecision(None, 0)):
        assert _decoded(json.loads(json.dumps(_encoded(sent)))) == sent


def test_functions_stay_where_they_are():
    own = request()
    own.sampling = SamplingParams(host=HostProcessing(token_mask=lambda tokens: None))
    message = _encoded_request(own)
    assert message == {"request_id": "name", "is_local": True}
    assert _decoded_request(message, {"name": own}.__getitem__) is own


def test_nothing_else_can_be_sent_or_made():
    with pytest.raises(TypeError, match="object cannot be sent to other ranks"):
        _encoded({"a": object()}["a"])
    with pytest.raises(KeyError):
        _decoded({"Popen": {"args": "true"}})


def wishes(ending: Ending = Ending.NONE, pauses: bool = False, is_idle: bool = True) -> Wishes:
    return Wishes(ending, pauses, is_idle)


def test_a_session_ends_softly_when_all_ask_for_it_and_nothing_is_left():
    for endings in itertools.product(Ending, repeat=2):
        for is_idle in (False, True):
            driver, other = wishes(endings[0], is_idle=is_idle), wishes(endings[1])
            ends = Ending.HARD in endings or (is_idle and endings == (Ending.SOFT, Ending.SOFT))
            assert (_turn(driver, (driver, other)).action is Action.END) == ends, (endings, is_idle)


def test_any_rank_can_pause_all():
    for pausing in ((True, False), (False, True)):
        driver, other = (wishes(Ending.SOFT, pauses) for pauses in pausing)
        assert _turn(driver, (driver, other)).action is Action.PARK


def test_what_the_driver_has_not_given_out_yet_runs_before_the_end():
    driver = Wishes(Ending.SOFT, False, True, Arrivals((request(),)))
    turn = _turn(driver, (driver, wishes(Ending.SOFT)))
    assert turn.action is Action.STEP
    assert turn.arrived == driver.arrived


def test_one_alone_decides_for_itself():
    alone = Ranks()
    assert (alone.is_driver, alone.is_alone) == (True, True)
    assert alone.agree(wishes(Ending.SOFT), nothing).action is Action.END
    assert alone.agree(wishes(), nothing).action is Action.STEP
    assert (alone.least(3), alone.of_driver(4), alone.any(False), alone.union(["b"])) == (3, 4, False, ("b",))
