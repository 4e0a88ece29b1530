"""Rows in files are those in memory bit for bit, and need neither memory nor names."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import HANG_SECONDS
from small_disk import needs_mount, small_disk

from dlrm_hybrid.model import tensors
from dlrm_hybrid.model.row_storage import FEWEST_ROWS, READERS, InFiles
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused
from dlrm_hybrid.model.tensors import draw_embeddings, embedding_parts
from dlrm_hybrid.types import ResourceError

SEED = 3


@pytest.mark.parametrize("count", [0, 1, FEWEST_ROWS + 1, 40 * READERS * FEWEST_ROWS + 3])
def test_any_number_of_rows_is_read(count: int, tmp_path: Path) -> None:
    storage = InFiles(tmp_path)
    rows_RC = storage.zeros(1000, 4)
    rows_RC.copy_(torch.arange(4000).view(1000, 4))
    chosen_K = torch.from_numpy(np.random.default_rng(0).integers(0, 1000, count))
    found_KC = storage.look_up(rows_RC, chosen_K)
    assert torch.equal(found_KC, rows_RC[chosen_K])
    with storage.reading_all():
        assert float(rows_RC.double().sum()) == sum(range(4000))


@pytest.mark.parametrize("init", ["uniform_rows", "uniform_width", 1e-4])
@pytest.mark.parametrize("elements", [1, 40, 1000])
def test_a_table_is_drawn_alike_in_parts(
    elements: int, init: tensors.TableInit, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_RD = torch.empty(123, 8)
    if init != "uniform_rows":  # of uniform draws one costs one random number, however many
        monkeypatch.setattr(tensors, "PART_ELEMENTS", elements)
    draw_embeddings({"embedding.1.weight": full_RD}, SEED, init)
    monkeypatch.setattr(tensors, "PART_ELEMENTS", elements)
    parts = list(embedding_parts("embedding.1.weight", 123, 8, SEED, init))
    assert max(len(part_RD) for part_RD in parts) == min(123, max(1, elements // 8))
    assert torch.equal(torch.cat(parts), full_RD)
    options = Fused()
    spec = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(1,), table_rows=(123,) * 26)
    for server in range(5):
        rows = TableRows(spec, options, server, 5)
        rows.draw(SEED, init)
        assert torch.equal(rows.pieces()[0].view, full_RD[server::5])


@pytest.mark.parametrize(
    ("init", "most", "deviation"),
    [
        ("uniform_rows", 1 / 20, 1 / 20 / 3**0.5),
        ("uniform_width", 1 / 4, 1 / 4 / 3**0.5),
        (0.01, 0.06, 0.01),
    ],
)
def test_tables_begin_by_the_law_that_was_chosen(
    init: tensors.TableInit, most: float, deviation: float
) -> None:
    table_RD = torch.empty(400, 16)
    draw_embeddings({"embedding.1.weight": table_RD}, SEED, init)
    assert float(table_RD.abs().max()) <= most
    assert float(table_RD.std()) == pytest.approx(deviation, rel=0.05)
    assert float(table_RD.mean()) == pytest.approx(0, abs=4 * deviation / 80)


@needs_mount
def test_a_disk_that_is_too_small_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as folder:
        storage = InFiles(folder)
        assert storage.zeros(256, 32)[255, 31] == 0
        with pytest.raises(ResourceError, match=r"disk: no file of 65,536 bytes .*No space left"):
            storage.zeros(512, 32)


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"file: .* File exists \(embedding.folder"):
        InFiles(tmp_path / "file").zeros(1, 1)


PROBE = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
from dlrm_hybrid.model.row_storage import IN_MEMORY, InFiles
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Fused

options = Fused()

def learned(rows, storage):
    table_rows = (rows,) + (1,) * 25
    spec = ModelSpec(embedding_dim=64, bottom=(13, 64), top=(1,), table_rows=table_rows)
    table = TableRows(spec, options, storage=storage)
    table.draw(3)
    ids = Rows(np.array([0, rows - 1]), np.array([2] + [0] * 25))
    table.update([(ids, torch.ones(2, 64))], 1.0)
    return table.look_up(ids).double().sum().item()

learned(10, IN_MEMORY)  # loads what it needs
status = Path("/proc/self/status").read_text()
(kilobytes,) = (int(one.split()[1]) for one in status.splitlines() if one.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (1024 * kilobytes + int(sys.argv[2]),) * 2)
print(learned(500_000, InFiles(Path(sys.argv[1])) if sys.argv[1] else IN_MEMORY))
"""


@pytest.mark.slow
def test_a_table_in_a_file_needs_little_memory(tmp_path: Path) -> None:
    """128 MB of rows where a process may allocate 64 MB more than it has."""

    def probe(folder: str, room_mib: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROBE, folder, str(room_mib << 20)]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
        )

    in_memory, refused, in_file = probe("", 512), probe("", 64), probe(str(tmp_path), 64)
    assert in_memory.returncode == 0, in_memory.stderr
    assert in_file.stdout == in_memory.stdout, in_file.stderr
    assert refused.returncode != 0
    assert "allocate memory" in refused.stderr
