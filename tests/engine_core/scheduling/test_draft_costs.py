from tokenloom.engine_core.data.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.scheduling.drafts import FEWEST_BETWEEN, PROBE, SAMPLES, DraftCosts


class Engine:
    """Runs steps whose times are known, as the costs allow them."""

    def __init__(self, *, plain: float, drafted: float, tokens: int = 3, drafting_takes_time: bool = True) -> None:
        self.plain, self.drafted, self.tokens = plain, drafted, tokens
        self.now = 0
        self.costs = DraftCosts(lambda: self.now, drafting_takes_time=drafting_takes_time)
        self.seconds = 0.0
        self.num_tokens = 0
        self._has_drafts = False

    def step(self, num_requests: int = 1, seconds: float | None = None, prompt: int = 0) -> bool:
        """Run a step; return whether it had drafts."""
        names = [str(number) for number in range(num_requests)]
        had_drafts, wants = self._has_drafts, self.costs.allows(num_requests)
        drafts = {name: [1] * self.tokens for name in names} if had_drafts else {}
        lengths = {name: 1 + prompt + len(drafts.get(name, ())) for name in names}
        cached = CachedRequestData([], [], [], {})
        scheduled = SchedulerOutput(
            [], cached, lengths, sum(lengths.values()), [], [], drafts, dict.fromkeys(names, 3) if wants else {}
        )
        self.costs.began()
        took = (self.drafted if had_drafts else self.plain) if seconds is None else seconds
        self.now += round(took * 1e9)
        tokens = self.tokens if had_drafts else 1
        self.costs.ended(scheduled, ModelRunnerOutput(names, [[1] * tokens for _ in names]))
        self.seconds += took
        self.num_tokens += tokens
        self._has_drafts = wants
        return had_drafts

    def run(self, count: int, **how: float) -> int:
        """Return how many of the steps had drafts."""
        return sum(self.step(**how) for _ in range(count))  # type: ignore[arg-type]


def test_drafts_that_save_time_go_on() -> None:
    engine = Engine(plain=1.0, drafted=2.0)
    assert engine.run(1000) > 0.95 * 1000
    assert engine.num_tokens / engine.seconds > 1.45  # 1.5 without probes


def test_drafts_that_cost_time_stop() -> None:
    for drafted in (3.1, 6.0, 40.0):
        engine = Engine(plain=1.0, drafted=drafted)
        engine.run(3 * SAMPLES + 2 * PROBE)
        assert not engine.costs.allows(1)
        engine.seconds = engine.num_tokens = 0
        engine.run(100_000)
        assert engine.num_tokens / engine.seconds > 0.985, drafted


def test_drafts_begin_again_once_they_pay() -> None:
    engine = Engine(plain=1.0, drafted=6.0)
    engine.run(100)
    assert not engine.costs.allows(1)
    engine.drafted = 2.0
    engine.run(5000)
    assert engine.run(FEWEST_BETWEEN // 2) >= FEWEST_BETWEEN // 2 - PROBE - 1


def test_each_size_of_a_batch_has_its_own_costs() -> None:
    engine = Engine(plain=1.0, drafted=6.0)
    engine.run(100, num_requests=6)
    assert not engine.costs.allows(5)
    assert engine.costs.allows(3)
    assert engine.costs.allows(8)


def test_a_few_slow_steps_do_not_count() -> None:
    engine = Engine(plain=1.0, drafted=2.0)
    engine.run(3)
    engine.run(4, seconds=500.0)  # they were recorded
    engine.run(100)
    assert engine.costs.allows(1)


def test_steps_with_prompts_do_not_count() -> None:
    engine = Engine(plain=1.0, drafted=2.0)
    engine.run(1000, seconds=500.0, prompt=7)
    assert not engine.costs._batches


def test_n_grams_that_find_nothing_cost_nothing() -> None:
    engine = Engine(plain=1.0, drafted=2.0, drafting_takes_time=False)
    allows = engine.costs.allows
    engine.costs.allows = lambda num_requests: False  # type: ignore[method-assign]
    engine.run(1000)
    assert allows(1)


def test_without_a_clock_that_runs_drafts_go_on() -> None:
    engine = Engine(plain=0.0, drafted=0.0)
    assert engine.run(1000) > 0.9 * 1000
