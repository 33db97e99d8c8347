"""Errors as other processes see them."""

from __future__ import annotations

import pickle  # noqa: TID251  what Ray does with errors

import pytest

from staged_sync.errors import (
    CompletenessError,
    ConfigurationError,
    DeadlineExceeded,
    EngineError,
    Failure,
    RanksAbsent,
    StagedSyncError,
    UpdateFailed,
)

LATE = DeadlineExceeded("no answer in time")
LATE.owed_by = (("engine0", "update_weights_from_distributed"),)

ERRORS = [
    UpdateFailed([Failure(0, "phase send", "EngineError", "gone")], state="poisoned", aftermath="Call again."),
    ConfigurationError(["one", "another"]), EngineError(1, "pause_generation", "it died"), RanksAbsent("nobody came", (2, 3)),
    CompletenessError("missing"), LATE]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_arrives_in_another_process_as_it_was(error: StagedSyncError) -> None:
    """Trainer ranks are Ray actors in most frameworks: what they raise is pickled."""
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))


def test_every_error_of_the_library_is_tried() -> None:
    assert {type(error) for error in ERRORS} >= {kind for kind in StagedSyncError.__subclasses__()
                                                 if "__init__" in vars(kind) and kind.__module__ == "staged_sync.errors"}
