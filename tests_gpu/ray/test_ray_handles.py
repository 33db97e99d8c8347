"""Ray actor handles as engines: what the live seam makes of real references, errors, dead actors and unknown methods."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray

from staged_sync.control import Deadline
from staged_sync.errors import DeadlineExceeded, EngineError
from staged_sync.live_seam import LiveSeam
from staged_sync.session import Fleet, Session
from staged_sync.trace import Trace
from staged_sync.transfer_group import lock_held
from staged_sync.waiting import call_engine, wait_all
from tests_gpu.ray.actors import Lock

pytestmark = [pytest.mark.beyond_main_job, pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
              pytest.mark.filterwarnings("ignore::ResourceWarning")]


class RaySeam(LiveSeam):
    """A live seam without torch.distributed and Megatron: the clock and the engines."""

    def __init__(self) -> None:
        pass


class Engine:
    """The control surface of a rollout engine, without an engine."""

    def __init__(self, broken: str = "") -> None:
        self.broken, self.calls = broken, []

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise RuntimeError(f"out of memory in {name}")

    def pause_generation(self) -> None:
        self._do("pause_generation")

    def start_weight_update(self, is_checkpoint_format: bool) -> None:
        self._do("start_weight_update")

    def silent(self) -> None:
        time.sleep(60)  # noqa: TID251  an engine that does not answer

    def seen(self) -> list[str]:
        return self.calls


def session_over(cluster: Any, *broken: str) -> tuple[Session, list[Any]]:
    engines = [cluster.remote(Engine).options(num_cpus=0).remote(method) for method in broken]
    seam = RaySeam()
    fleet = Fleet(tuple(engines), (1,) * len(engines), None, (False,) * len(engines))
    return Session(seam, Trace(0, seam.now), fleet), engines


def kill(cluster: Any, actor: Any) -> None:
    """Returns when it is dead: `ray.kill` only asks for it, and an actor may answer one more call."""
    cluster.get(actor.seen.remote(), timeout=60)
    cluster.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):
        while True:
            cluster.get(actor.seen.remote(), timeout=60)


def in_s(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds, "update_weight_call_timeout")


def test_every_actor_is_asked_and_answers(cluster: Any) -> None:
    session, engines = session_over(cluster, "", "")
    session.pause(in_s(60), 1.0)
    session.start(in_s(60), 1.0)
    seen = [cluster.get(engine.seen.remote(), timeout=60) for engine in engines]
    assert seen == [["pause_generation", "start_weight_update"]] * 2


def test_the_text_of_an_actors_own_error_is_kept(cluster: Any) -> None:
    session, _ = session_over(cluster, "", "start_weight_update")
    with pytest.raises(EngineError, match=r"(?s)rollout engine 1 failed in start_weight_update.*out of memory in") as failed:
        session.start(in_s(60), 1.0)
    assert failed.value.engine == 1


def test_a_dead_actor_is_an_engine_error_at_once(cluster: Any) -> None:
    session, engines = session_over(cluster, "", "")
    kill(cluster, engines[1])
    began = time.monotonic()
    with pytest.raises(EngineError, match="rollout engine 1 failed in pause_generation"):
        session.pause(in_s(60), 1.0)
    assert time.monotonic() - began < 10


def test_an_actor_that_does_not_answer_ends_at_the_deadline(cluster: Any) -> None:
    seam = RaySeam()
    engine = cluster.remote(Engine).options(num_cpus=0).remote()
    cluster.get(engine.seen.remote(), timeout=60)
    trace = Trace(0, seam.now)
    with pytest.raises(DeadlineExceeded, match="still waiting for silent of rollout engine 0"):
        wait_all(seam, trace, [call_engine(seam, trace, 0, engine, "silent")], in_s(1.0))


def test_a_handle_knows_the_methods_of_its_class(cluster: Any) -> None:
    engine = cluster.remote(Engine).options(num_cpus=0).remote()
    seam = RaySeam()
    assert seam.has_method(engine, "pause_generation") and not seam.has_method(engine, "update_weight_version")
    with pytest.raises(EngineError, match="rollout engine 0 failed in flush_cache: the call could not be made"):
        call_engine(seam, Trace(0, seam.now), 0, engine, "flush_cache")


def test_a_lock_actor_is_released_after_an_error_too(cluster: Any) -> None:
    seam = RaySeam()
    lock = cluster.remote(Lock).options(num_cpus=0).remote()
    trace = Trace(0, seam.now)
    with pytest.raises(ValueError, match="inside"), lock_held(seam, trace, lock, in_s(60), grace_s=5.0):
        assert cluster.get(lock.is_held.remote(), timeout=60)
        raise ValueError("inside")
    assert not cluster.get(lock.is_held.remote(), timeout=60)


def test_looking_at_a_thousand_replies_is_cheap(cluster: Any) -> None:
    """A fleet's replies are looked at again and again: that must not ask Ray each time."""
    seam = RaySeam()
    engine = cluster.remote(Engine).options(num_cpus=0).remote()
    works = [seam.call(engine, "seen") for _ in range(1000)]
    wait_all(seam, Trace(0, seam.now), [call_engine(seam, Trace(0, seam.now), 0, engine, "seen")], in_s(60))
    assert seam.wait_any(works, timeout_s=60)
    deadline = in_s(60)
    while not all(work.poll() for work in works):
        assert deadline.left_s(seam.now()) > 0
        seam.wait_any([work for work in works if not work.poll()], timeout_s=1)
    calls = 0
    real_wait = ray.wait

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return real_wait(*args, **kwargs)

    ray.wait = counting
    try:
        assert all(work.poll() for work in works)
    finally:
        ray.wait = real_wait
    assert calls == 0
