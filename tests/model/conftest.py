from collections.abc import Callable, Iterator

import pytest
import torch
from embedding_runs import run_several


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict]]:
    """What trainers tell of one of the module's WORLDS.

    The quick ones with as many trainers are gone through by the same processes.
    """
    worlds, known = request.module.WORLDS, dict[str, list[dict]]()

    def told_of(name: str) -> list[dict]:
        if name not in known:
            world = worlds[name]
            together = {name: world}
            if not world.is_slow:
                of_as_many = ((key, one) for key, one in worlds.items() if not one.is_slow)
                together = {k: one for k, one in of_as_many if one.trainers == world.trainers}
            known.update(run_several(tmp_path_factory.mktemp("worlds"), together))
        return known[name]

    return told_of
