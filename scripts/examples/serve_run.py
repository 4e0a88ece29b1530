"""Scores rows over HTTP with the model of a run, and applies deltas to it while it serves.

python serve_run.py RUN [PORT [DELTAS]]; then curl localhost:8000 -d '[{"age": 31, "city": null}]'.
What `export export.since=…` writes into the folder DELTAS is applied in order of name, as it comes.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import sleep

import pandas as pd

from dlrm_hybrid.predict import Predictor
from dlrm_hybrid.types import DataError

predictor = Predictor(sys.argv[1], threads=1)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:  # noqa: N802
        text = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            status, answer = 200, predictor.predict(pd.DataFrame(json.loads(text))).tolist()
        except (DataError, ValueError) as error:  # of a value, or no JSON
            status, answer = 400, str(error)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def _apply(deltas: Path) -> None:
    applied = ""
    while True:
        for delta in sorted(one for one in deltas.glob("[!.]*") if one.name > applied):
            try:
                predictor.update(delta)
                print(f"now of {predictor.checkpoint}", flush=True)
            except DataError as error:  # it goes on with the model that it has
                print(error, flush=True)
            applied = delta.name
        sleep(1)


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2]) if sys.argv[2:] else 8000), _Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
if sys.argv[3:]:
    Thread(target=_apply, args=[Path(sys.argv[3])], daemon=True).start()
server.serve_forever()
