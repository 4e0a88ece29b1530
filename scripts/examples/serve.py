"""Scores rows over HTTP with a model exported by `export.format=onnx`.

python serve.py FOLDER [PORT [ignore]]; then curl localhost:8000 -d '[{"age": 31, "city": null}]'.
Rows have all columns of the schema without a `default`; with `ignore` they may have others too.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import onnxruntime  # pyright: ignore[reportMissingImports]

from dlrm_hybrid.saved.inputs import ModelInputs
from dlrm_hybrid.types import DataError

session: Any = onnxruntime.InferenceSession(Path(sys.argv[1], "model.onnx"))  # pyright: ignore
inputs = ModelInputs(sys.argv[1], extra="ignore" if sys.argv[3:] == ["ignore"] else "error")


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # noqa: N802
        text = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, answer = 200, session.run(["score"], inputs(json.loads(text)))[0].tolist()
        except (DataError, ValueError) as error:  # of a value, or no JSON
            status, answer = 400, str(error)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8000), _Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
