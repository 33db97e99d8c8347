"""`staged-sync plan` says what the library will do."""

from __future__ import annotations

import pytest

from staged_sync.cli import main


def test_the_plan_of_two_stages_with_two_tensor_parallel_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--tp", "2", "--pp", "2", "--engines", "1", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "transfer group: the source at rank 0, engine 0 at rank 1, engine 1 at ranks 2..3; world size 4",
        "pause          rank 0 asks every engine",
        "flush          rank 0 asks every engine",
        "barrier        all ranks: paused",
        "start          rank 0 asks every engine",
        "barrier        all ranks: started",
        "open           rank 0 opens vime-pp_0",
        "barrier        all ranks: stage 0 open",
        "send           rank 0 sends the dense part of stage 0, with gather peers 1",
        "barrier        all ranks: stage 0 dense",
        "send           rank 0 sends the expert part of stage 0, with gather peers 1",
        "barrier        all ranks: stage 0 expert",
        "synchronize    rank 0 waits until stage 0 has left its device",
        "close          rank 0 closes vime-pp_0",
        "barrier        all ranks: stage 0 closed",
        "open           rank 2 opens vime-pp_1",
        "barrier        all ranks: stage 1 open",
        "send           rank 2 sends the dense part of stage 1, with gather peers 3",
        "barrier        all ranks: stage 1 dense",
        "send           rank 2 sends the expert part of stage 1, with gather peers 3",
        "barrier        all ranks: stage 1 expert",
        "synchronize    rank 2 waits until stage 1 has left its device",
        "close          rank 2 closes vime-pp_1",
        "barrier        all ranks: stage 1 closed",
        "finish         rank 0 asks every engine",
        "barrier        all ranks: finished",
        "publish        rank 0 asks every engine",
        "barrier        all ranks: published",
        "resume         rank 0 asks every engine",
        "barrier        all ranks: resumed",
    ]


def test_the_plan_of_one_stage_says_that_the_group_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "at connect     rank 0 opens vime-pp_0 and keeps it"
    assert not any(line.startswith(("open", "close")) for line in lines)


def test_a_size_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--pp", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


def test_the_plan_of_a_bridge_is_one_pass_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--pp", "2", "--export", "bridge"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "at connect     rank 0 opens vime-pp_0 and keeps it"
    assert lines[7:10] == [
        "send           rank 0 sends the whole model, with gather peers 1",
        "barrier        all ranks: model exported",
        "synchronize    rank 0 waits until stage 0 has left its device",
    ]


def test_the_plan_of_a_stage_local_bridge_has_three_barriers_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--pp", "2", "--export", "stage-local-bridge"])
    barriers = [line for line in capsys.readouterr().out.splitlines() if line.startswith("barrier") and "stage" in line]
    assert barriers == [f"barrier        all ranks: stage {stage} {what}" for stage in (0, 1)
                        for what in ("open", "exported", "closed")]
