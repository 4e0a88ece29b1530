from dlrm_hybrid.telemetry.meter import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watch(warmup_steps: int) -> tuple[Stopwatch, Clock, Clock]:
    wall, cpu = Clock(), Clock()
    return Stopwatch(warmup_steps=warmup_steps, wall_clock=wall, cpu_clock=cpu), wall, cpu


def step(stopwatch: Stopwatch, wall: Clock, cpu: Clock) -> None:
    wall.now += 2.0
    cpu.now += 1.0
    stopwatch.step_done(10)


def test_warmup_steps_do_not_count() -> None:
    stopwatch, wall, cpu = watch(warmup_steps=2)
    for _ in range(5):
        step(stopwatch, wall, cpu)
    assert stopwatch.take() == (30, 6.0, 3.0)
    step(stopwatch, wall, cpu)
    assert stopwatch.take() == (10, 2.0, 1.0)


def test_pauses_do_not_count() -> None:
    stopwatch, wall, cpu = watch(warmup_steps=1)
    step(stopwatch, wall, cpu)
    step(stopwatch, wall, cpu)
    stopwatch.pause()
    wall.now += 100.0
    stopwatch.resume()
    step(stopwatch, wall, cpu)
    assert stopwatch.take() == (20, 4.0, 2.0)


def test_a_pause_within_the_warmup_starts_nothing() -> None:
    stopwatch, wall, cpu = watch(warmup_steps=2)
    step(stopwatch, wall, cpu)
    stopwatch.pause()
    wall.now += 100.0
    stopwatch.resume()
    assert stopwatch.take() == (0, 0.0, 0.0)
    step(stopwatch, wall, cpu)
    step(stopwatch, wall, cpu)
    assert stopwatch.take() == (10, 2.0, 1.0)
