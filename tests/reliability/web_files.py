"""A web server of files, and the file system that reads from it: what a user gives as ``Storage(filesystem=…)``."""

from __future__ import annotations

import http.server
import io
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Answers requests for parts of a file, as web servers do, and Python's own does not."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path)).read_bytes()
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class _WebFile(io.RawIOBase):
    """A file of known size; each read is a request for that part."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._offset = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._size}[whence]
        return self._offset

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._offset + size, self._size)
        if stop <= self._offset:
            return b""
        wanted = {"Range": f"bytes={self._offset}-{stop - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, headers=wanted)) as answer:
            data: bytes = answer.read()
        self._offset += len(data)
        return data


class _WebHandler(fs.FileSystemHandler):
    """The half of a file system that loaderd uses for shards which are named."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get_type_name(self) -> str:
        return "web"

    def normalize_path(self, path: str) -> str:
        return path

    def _url_of(self, path: str) -> str:
        return f"{self._url}/{path}"

    def _size(self, path: str) -> int:
        with urllib.request.urlopen(urllib.request.Request(self._url_of(path), method="HEAD")) as answer:
            return int(answer.headers["Content-Length"])

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        try:
            return fs.FileInfo(path, fs.FileType.File, size=self._size(path))
        except urllib.error.HTTPError:
            return fs.FileInfo(path, fs.FileType.NotFound)

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_WebFile(self._url_of(path), self._size(path)), mode="r")

    def _unused(self, *arguments: Any) -> Any:
        raise NotImplementedError

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _unused
    delete_file = move = copy_file = open_input_stream = open_output_stream = open_append_stream = _unused


def web_filesystem(url: str) -> fs.PyFileSystem:
    """Of a server of :class:`Ranges`."""
    return fs.PyFileSystem(_WebHandler(url))
