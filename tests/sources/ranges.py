"""A program that reads parts of URLs as the process that reads ahead does, and as a worker does, from a server of its
own that knows ranges, or does not; and says as JSON what each got."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minato_gpu import Source
from minato_gpu.sources.reading import read_bytes
from minato_gpu.sources.remote import RemoteReads

CONTENT = b"0123456789"
PARTS = ((0, None), (0, 0), (0, 4), (5, 0), (5, 3), (5, None), (9, None), (0, 10))


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        content = CONTENT
        if wanted and self.path == "/ranges":
            begin, end = int(wanted[1]), int(wanted[2] or len(CONTENT) - 1) + 1
            content = CONTENT[begin:end]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(CONTENT)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


async def _ahead(sources: list[Source]) -> list[str]:
    remote = RemoteReads()
    found = await asyncio.gather(*map(remote.read, sources), return_exceptions=True)
    await remote.close()
    return [each.decode() if isinstance(each, bytes) else _named(each) for each in found]


def _by_worker(source: Source) -> str:
    try:
        return read_bytes(source).tobytes().decode()
    except Exception as error:
        return _named(error)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said: dict[str, dict[str, list[str]]] = {}
    for path in ("ranges", "whole"):
        sources = [Source(f"http://127.0.0.1:{server.server_port}/{path}", *part) for part in PARTS]
        said[path] = {"ahead": asyncio.run(_ahead(sources)), "by worker": [_by_worker(each) for each in sources]}
    sys.stdout.write(json.dumps(said))
