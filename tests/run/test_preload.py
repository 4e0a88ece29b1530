"""What the forkserver makes ahead exists: nothing else would say so but every run of processes."""

import ast
from importlib import import_module, util
from pathlib import Path


def test_what_is_made_before_ranks_are_forked_exists() -> None:
    spec = util.find_spec("dlrm_hybrid.run.rank.preload")
    assert spec is not None and spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body  # to import it is to do it
    assigned = [one for one in body if isinstance(one, ast.Assign)]
    values = {ast.unparse(one.targets[0]): ast.literal_eval(one.value) for one in assigned}
    assert len(values["FIRST"]) >= 3
    for module, function, arguments in values["FIRST"]:
        assert callable(getattr(import_module(module), function)), (module, function, arguments)
