"""What trainers send each other for rows of tables: every id or distinct ones, halves, levels."""

from world_runs import Trained, assert_same, assert_same_state, curve, summary

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind

WORLD = ("parallel=hybrid", "parallel.cuts=[]")
DISTINCT = "embedding.deduplicate=true"
LEVELS = (DISTINCT, "embedding.levels=true")
IN_PROCESS = "parallel.world=in_process"


def test_one_trainer_sends_nothing_whatever_the_options(trained: Trained) -> None:
    layout = (*WORLD, "parallel.trainers=1", "train.steps=20")
    trained("plain", *layout, IN_PROCESS)
    narrow = ("embedding.comm_precision=bfloat16", DISTINCT)
    for name, world in (
        ("in-process", (*narrow, IN_PROCESS)),
        ("processes", narrow),
        ("levels", (*LEVELS, IN_PROCESS)),
    ):
        folder = trained(name, *layout, *world)
        assert_same(folder, folder.with_name("plain"), 20)
        by_class = summary(folder)["network"]["by_class"]
        assert by_class.get("embedding", {"bytes": 0})["bytes"] == 0


def test_bytes_get_fewer_and_count_as_much(trained: Trained) -> None:
    sent = {}
    for name, options in {
        "float32": (),
        "float16": ("embedding.comm_precision=float16",),
        "distinct": (DISTINCT,),
        "levels": (*LEVELS, "embedding.copies_rows=16"),
    }.items():
        folder = trained(name, *WORLD, "train.batch_size=16", "train.steps=12", *options)
        sent[name] = summary(folder)["network"]["by_class"]["embedding"]
        assert sent[name]["dense_equivalent_bytes"] == sent["float32"]["dense_equivalent_bytes"]
    number = {name: one["bytes"] for name, one in sent.items()}
    assert 0.5 < number["float16"] / number["float32"] < 0.6
    assert number["distinct"] < 0.9 * number["float32"]
    assert number["levels"] < 0.35 * number["distinct"]
    told = [values["of"] for _, values in curve(folder) if "of" in values]
    assert sum(one["rows.lost_residuals"]["sent"] for one in told) > 0  # few are remembered
    assert all(0 < one["rows.levels"]["density"] < 1 for one in told)


def test_levels_from_one_table_server_are_those_of_sharded_tables(trained: Trained) -> None:
    """Bit for bit with SGD: who holds the rows decides nothing."""
    options = (*WORLD, "train.batch_size=16", "train.steps=20", IN_PROCESS)
    options = (*options, "embedding.levels=true", "embedding.copies_rows=16")
    sharded = trained("sharded", *options, DISTINCT)
    served = trained("served", *options, "embedding=served", "parallel.table_servers=1")
    assert_same_state(served, sharded, 20)
    assert summary(served)["compression"] == summary(sharded)["compression"]
    assert summary(served)["test"] == summary(sharded)["test"]


def test_an_evaluation_sends_each_row_once_and_scores_the_same(trained: Trained) -> None:
    options = (*WORLD, *LEVELS, "train.batch_size=16", "train.steps=12")
    scores, sent = [], {}
    for name, more in {
        "here": (IN_PROCESS,),
        "one batch": (),
        "many batches": ("evaluate.batch_size=8",),
    }.items():
        folder = trained(name, *options, *more)
        scores.append(summary(folder)["test"])
        traffic = [
            event.values["traffic"]["evaluate"]
            for event in events.read(folder / "events.jsonl")
            if event.kind is Kind.RANK
        ]
        sent[name] = sum(one["embedding"]["bytes"] for one in traffic if "embedding" in one)
    assert scores[0] == scores[1] == scores[2]
    assert 0 < sent["many batches"] < 1.5 * sent["one batch"]
