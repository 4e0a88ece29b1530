from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.run.training import RestartBudget


@given(
    pauses=st.lists(st.floats(0.0, 10.0), max_size=30),
    limit=st.integers(0, 4),
    window=st.floats(0.1, 20.0),
)
def test_no_window_holds_more_than_its_limit(
    pauses: list[float], limit: int, window: float
) -> None:
    restarts, now, made = RestartBudget(limit, window), 0.0, list[float]()
    for pause in pauses:
        now += pause
        recent = [time for time in made if time > now - window]
        number = restarts.another(now)
        assert number == (len(recent) + 1 if len(recent) < limit else None)
        if number is not None:
            made.append(now)
        assert restarts.made == len(made)
