"""The time for which a process itself was busy makes no peer of it silent."""

from tokenloom.services.runtime.liveness import LivenessTimer


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def looks_until(timer: LivenessTimer, time: Time, seconds: float, turn: float) -> int:
    """Return how many looks find that less is owed."""
    looks = 0
    time.now += turn
    while timer.look(owes=True) < seconds:
        looks += 1
        time.now += turn
    return looks


def test_what_is_owed_adds_up_however_often_one_looks() -> None:
    time = Time()
    assert looks_until(LivenessTimer(time), time, 10.0, 0.5) == 19
    assert looks_until(LivenessTimer(time), time, 10.0, 0.25) == 39


def test_it_begins_anew_when_nothing_is_owed_and_when_it_has_come() -> None:
    time = Time()
    timer = LivenessTimer(time)
    assert looks_until(timer, time, 9.5, 0.5) == 18
    time.now += 0.5
    assert timer.look(owes=False) == 0.0
    assert looks_until(timer, time, 9.5, 0.5) == 18
    timer.owed = 0.0
    assert looks_until(timer, time, 10.0, 0.5) == 19


def test_a_pause_of_this_process_is_a_short_turn() -> None:
    time = Time()
    timer = LivenessTimer(time)
    time.now += 3600
    assert timer.look(owes=True) == 0.5
    assert looks_until(timer, time, 10.0, 0.5) == 18
