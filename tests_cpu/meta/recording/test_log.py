"""Stories fail with both sides on the page."""

from __future__ import annotations

import pytest

from harness.recording.log import actor_calls, assert_story, calls
from staged_sync.trace import Event, Trace


def starts(prefix: str) -> object:
    def starts_with(line: str) -> bool:
        return line.startswith(prefix)
    return starts_with


def test_equal_stories_pass() -> None:
    assert_story(["a", "b"], ["a", "b"])
    assert_story(["a", "b 1", "c"], ["a", starts("b"), "c"])
    assert_story([], [])


def test_a_strict_story_prints_both_lists_aligned() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_story(["init", "send one", "close"], ["init", "barrier", starts("close"), "end"])
    assert str(caught.value).splitlines() == [
        "the story differs (> marks where)",
        "  expected      | found",
        "  init          | init",
        "> barrier       | send one",
        "  <starts_with> | close",
        "> end           | (nothing)",
    ]


def test_a_story_with_too_much_in_it_fails() -> None:
    with pytest.raises(AssertionError, match=r"> \(nothing\) \| extra"):
        assert_story(["a", "extra"], ["a"])


def test_a_loose_story_wants_the_order_only() -> None:
    assert_story(["a", "x", "b", "y"], ["a", starts("b")], strict=False)
    with pytest.raises(AssertionError, match=r"(?s)expected, in this order:.*> a.*found:.*  b"):
        assert_story(["a", "b"], ["b", "a"], strict=False)


@pytest.mark.parametrize("malformed", ["a text", [1], [None]])
def test_a_malformed_story_is_refused(malformed: object) -> None:
    with pytest.raises(TypeError, match="a story is a list"):
        assert_story(["a"], malformed)  # type: ignore[arg-type]


def test_calls_leave_out_done_and_phases_and_other_ranks() -> None:
    log: list[Event] = []
    trace = Trace(1, lambda: 0.0, events=log)
    with trace.at(phase="send", stage=0, bucket=2, group="vime-pp_0"):
        trace.record("phase", detail="send")
        with trace.waiting("send", detail="a b"):
            log.append(Event(0.0, None, "engine0", "handle", detail="update"))
    Trace(0, lambda: 0.0, events=log).record("error", detail="x")
    with pytest.raises(ValueError, match="x"), trace.waiting("barrier", detail="y"):
        raise ValueError("x")
    assert calls(log, 1) == ["send vime-pp_0 stage=0 bucket=2 a b", "barrier y", "barrier.failed y"]
    assert actor_calls(log, "engine0") == ["handle update"]
