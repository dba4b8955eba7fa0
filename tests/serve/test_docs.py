"""The code of docs/server.md runs, against the server that it starts; the examples are what they say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from loaderd.cli.main import parser
from loaderd.cli.serve import options_of
from loaderd.remote.tickets import RowsTicket
from loaderd.serve.options import HttpOptions
from tests.helpers.serving import COMMAND, Server

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "server.md").read_text()
OPERATIONS = (ROOT / "docs" / "server-operations.md").read_text()
MANY = (ROOT / "docs" / "many-machines.md").read_text()
EXAMPLES = ROOT / "examples" / "server"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Server]]:
    """The server of this machine, and that of the network, with a certificate of its own, in a folder with shards."""
    if shutil.which("openssl") is None:
        pytest.skip("the certificate is made with the openssl command, which is not here")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*make.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    shutil.copy(tmp_path / "cert.pem", tmp_path / "ca.pem")
    rng = np.random.default_rng(0)
    (tmp_path / "shards").mkdir()
    with tf.io.TFRecordWriter(str(tmp_path / "shards" / "0.tfrecord")) as writer:
        for _ in range(1500):
            bits = tf.train.Feature(bytes_list=tf.train.BytesList(value=[rng.bytes(194)]))
            score = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(rng.integers(-500, 500))]))
            example = tf.train.Example(features=tf.train.Features(feature={"d": bits, "s": score}))
            writer.write(example.SerializeToString())
    (tmp_path / "datasets.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    session = next(each for each in blocks("console") if "--tls-cert" in each).replace("\\\n", "")
    *make_token, serve = re.findall(r"^\$ (.*)$", session, re.M)
    subprocess.run(["sh", "-c", "; ".join(make_token).replace("python -c", "python3 -c", 1)], check=True)
    arguments = serve.removeprefix("loaderd serve ").replace("8471", "0").split()
    network = Server(tmp_path, *arguments, network=True)
    here = Server(tmp_path, "datasets:train", "--workers", "1", unix=str(tmp_path / "loaderd.sock"))
    yield here, network
    here.close()
    network.close()


def test_the_code_runs(served: tuple[Server, Server]):
    here, network = served
    here.wait_line("connect with")
    network.wait_ready()
    port = network.address.rpartition(":")[2]
    names: dict[str, Any] = {}
    for block in blocks("python")[1:]:
        exec(compile(block.replace("trainer7:8471", f"localhost:{port}"), "server.md", "exec"), names)
    with names["loader"] as loader:
        boards = [np.array(batch["board"]) for batch in loader]
    assert boards[-1].shape[1:] == names["board"].shape[1:] == (8, 8, 24)


def test_the_unit(tmp_path: Path):
    text = (EXAMPLES / "loaderd.service").read_text()
    (command,) = re.findall(r"^ExecStart=%h/training/.venv/bin/loaderd (.*)$", text, re.MULTILINE)
    options = options_of(parser().parse_args(command.split()))
    assert options.targets == ("datasets:train", "datasets:validation")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here")
    here = tmp_path / "loaderd.service"
    here.write_text(text.replace("%h/training/.venv/bin/loaderd", COMMAND))
    done = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container():
    text = (EXAMPLES / "Containerfile").read_text().replace("\\\n", "")
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    (check,) = re.findall(r"^HEALTHCHECK CMD (.*)$", text, re.MULTILINE)
    options = options_of(parser().parse_args(json.loads(entry)[1:]))
    assert f"http://{options.health}/readyz" in json.loads(check)[2]


def test_the_module(tmp_path: Path):
    """It names what the unit and the container serve."""
    code = "import datasets as d, loaderd; assert isinstance(d.train, loaderd.Dataset); print(d.validation.shuffle)"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr


def test_the_keys_of_tickets_are_all_there():
    keys = re.findall(
        r"^\| `(\w+)` \|[^|]*\|", OPERATIONS[OPERATIONS.index("A ticket is a JSON object") :], re.MULTILINE
    )
    names = [each.name for each in fields(RowsTicket)]
    assert sorted(keys[: len(names)]) == sorted(names)


def test_the_servers_of_kubernetes(monkeypatch: pytest.MonkeyPatch):
    """What is started there is a command of ours, and the ports are those of the probes and of the consumers."""
    text = (ROOT / "examples" / "kubernetes" / "loaderd.yaml").read_text()
    arguments = re.findall(r"^            - (datasets:\w+|--.*)$", text, re.MULTILINE)
    certificates = [each for each in arguments if each.startswith("--tls")]
    assert certificates == ["--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"]
    monkeypatch.setenv("LOADERD_TOKEN", "that-of-the-secret")
    here = [each for each in arguments if each not in certificates]
    options = options_of(parser().parse_args(["serve", *here, "--insecure"]))
    assert isinstance(options, HttpOptions)
    assert options.targets == ("datasets:train", "datasets:validation")
    assert options.health is not None
    assert text.count(f"port: {options.health.port}") == 2 and f"port: {options.listen.port}" in text
    assert set(re.findall(r"path: (/\w+z)$", text, re.MULTILINE)) == {"/livez", "/readyz"}


def test_the_consumers_of_kubernetes(monkeypatch: pytest.MonkeyPatch):
    (block,) = re.findall(r"^```python\n(import socket.*?)^```$", MANY, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block.replace('"loaderd", 8471', '"localhost", 8471'), "many-machines.md", "exec"), names)
    assert names["servers"]() == ["https://127.0.0.1:8471"]


def test_the_job_of_slurm():
    path = ROOT / "examples" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)
    (command,) = re.findall(r"loaderd (serve .*?) 2>", path.read_text().replace("\\\n", " "))
    options = options_of(parser().parse_args(command.replace("$port", "8471").replace('"', "").split()))
    assert isinstance(options, HttpOptions) and (options.targets, options.workers) == (("datasets:train",), 6)
