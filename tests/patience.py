"""How long tests wait for what must come: so long that only a hang, not a busy machine, ends it.

No test may say how fast something is: it says what must have happened, and what not. Where one must
know that nobody waited for a patience of the program, it gives the program this patience, or more:
all runs on `small_rows` of conftest.py have it.
"""

HANG_SECONDS = 600.0
# An override for ranks that must never lose patience with each other.
PATIENT = f"network.patience_seconds={2 * HANG_SECONDS:g}"
