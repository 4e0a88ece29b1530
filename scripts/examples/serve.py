"""Scores rows over HTTP, from a folder of `export.format=onnx`: python serve.py FOLDER [PORT].
What is left out is missing: curl localhost:8000 -d '[{"I1": 5, "C1": "0000002a"}]'"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]

about = json.loads(Path(sys.argv[1], "model.json").read_text())
session: Any = onnxruntime.InferenceSession(Path(sys.argv[1], about["file"]))  # pyright: ignore
dense, tables = (about["inputs"][name]["columns"] for name in ("dense", "ids"))
for one in tables:
    keys = np.load(Path(sys.argv[1], one["vocabulary"])).tolist()
    one["ids"] = dict(zip(keys, range(one["first_id"], one["rows"]), strict=True))


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # noqa: N802
        rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        values = [[max(row.get(one["name"]) or 0, 0) for one in dense] for row in rows]
        ids = [[id_of(one, row.get(one["name"]) or "0") for one in tables] for row in rows]
        feed = {"dense": np.log1p(values).astype(np.float32), "ids": np.array(ids)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(session.run(["score"], feed)[0].tolist()).encode())


def id_of(table: dict[str, Any], text: str) -> int:
    """The row of a category; raises KeyError where no row stands for unknown ones."""
    key = int(text, 16) % (about["data"]["max_ind_range"] or 1 << 32)
    return table["ids"].get(key, 0) if table["first_id"] else table["ids"][key]


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8000), _Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
