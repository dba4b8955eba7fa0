"""Who is let in, and who is believed: tokens and certificates, with real processes, and what is said of others."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time

import numpy as np
import pytest
import urllib3

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import OptionError, ServerError
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.security import check_token, read_token, read_tokens
from loaderd.remote.source import Settings
from loaderd.remote.tickets import RowsTicket
from tests.helpers.commands import run
from tests.helpers.serving import wait_until
from tests.remote.network_server import NetworkServer

TOKEN = "n0t-f0r-everybody"


def datasets(server, address=None, **options):
    report = ask_status(address or server.address, **options)
    return [each["name"] for each in report["datasets"]]


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("token") / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory, write_numbered_to, certificates, token_file):
    folder = tmp_path_factory.mktemp("server")
    write_numbered_to(folder / "shards", [300, 400, 300])
    secrets = ("--tls-cert", certificates.server_cert, "--tls-key", certificates.server_key)
    started = NetworkServer(folder, *secrets, "--token-file", str(token_file))
    yield started
    started.close()


@pytest.fixture(scope="module")
def tls(certificates):
    return loaderd.TLS(ca=certificates.ca)


def refused(server, address=None, **options):
    """The error of a training, which comes at once: no later attempt would change anything."""
    began_s = time.monotonic()
    with pytest.raises(ServerError) as caught:
        loaderd.connect(address or server.address, "train", batch_size=100, workers=1, **options)
    assert time.monotonic() - began_s < 30 and caught.value.hint
    assert TOKEN not in str(caught.value)
    return caught.value


def test_who_has_the_token_gets_batches(server, tls, monkeypatch):
    with loaderd.connect(server.address, dataset="train", batch_size=100, token=TOKEN, tls=tls) as loader:
        assert sum(batch.num_records for batch in loader) == 1000
    monkeypatch.setenv("LOADERD_TOKEN", TOKEN)
    with loaderd.connect(server.address, dataset="train", batch_size=100, tls=tls) as loader:
        assert sum(batch.num_records for batch in loader) == 1000


@pytest.mark.parametrize(
    ("command", "words"), [("status", '"train"'), ("doctor", "has no consumer that can be diagnosed")]
)
def test_commands_show_the_token_and_believe_the_ca_that_they_are_given(
    command, words, server, certificates, token_file
):
    options = [command, server.address, "--json", "--token-file", token_file]
    done = run(*options, "--tls-ca", certificates.ca)
    assert words in done.stdout + done.stderr
    for wrong, why in (
        (["--tls-ca", certificates.other_ca], "is not trusted"),
        (["--tls-cert", certificates.client_cert], "TLS.cert and TLS.key belong together"),
    ):
        done = run(*options, *wrong)
        assert done.returncode and why in done.stderr


@pytest.mark.one_variant
@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x"])
def test_another_token_is_refused(server, tls, token):
    error = refused(server, token=token, tls=tls)
    assert "refuses the token" in error.message and "LOADERD_TOKEN" in error.hint


def test_the_name_may_be_said(server, certificates):
    by_name = server.address.replace("127.0.0.1", "localhost")
    assert datasets(server, by_name, token=TOKEN, tls=loaderd.TLS(ca=certificates.ca)) == ["train"]
    named = loaderd.TLS(ca=certificates.ca, server_name="localhost")
    assert datasets(server, token=TOKEN, tls=named) == ["train"]
    other = loaderd.TLS(ca=certificates.ca, server_name="other.example")
    with pytest.raises(ServerError, match=r"not trusted: Hostname mismatch.*'other.example'"):
        datasets(server, token=TOKEN, tls=other)


def test_a_certificate_of_somebody_else(server, certificates):
    error = refused(server, token=TOKEN, tls=loaderd.TLS(ca=certificates.other_ca))
    assert "is not trusted: " in error.message and certificates.other_ca in error.hint
    with pytest.raises(ServerError, match=r"is not trusted: .*certificate"):
        datasets(server, token=TOKEN)


def test_an_expired_certificate(start_server, certificates, tls):
    """Its server lives, and is not ready; and consumers are told."""
    server = start_server("--tls-cert", certificates.expired, "--tls-key", certificates.server_key)
    assert "is not trusted: certificate has expired" in refused(server, tls=tls).message
    ready = urllib3.request("GET", f"{server.server.health}/readyz", retries=False)
    assert (ready.status, ready.data) == (503, b"the certificate has expired\n")
    assert urllib3.request("GET", f"{server.server.health}/livez", retries=False).status == 200


def test_tls_on_one_side_only(server, start_server, tls):
    plain = start_server()
    plain.server.wait_line("without a token, every user of this machine can read the data sets")
    assert not any("can read the data sets" in line for line in server.server.said)
    error = refused(plain, plain.address.replace("http", "https"), tls=tls)
    assert "does not speak TLS" in error.message and f"http://127.0.0.1:{plain.port}" in error.hint
    error = refused(server, server.address.replace("https", "http"), token=TOKEN)
    assert "speaks TLS" in error.message and f"https://127.0.0.1:{server.port}" in error.hint


def test_a_server_that_asks_for_a_certificate(start_server, certificates, tls, token_file):
    server = start_server(
        *("--tls-cert", certificates.server_cert, "--tls-key", certificates.server_key),
        *("--tls-client-ca", certificates.ca, "--token-file", str(token_file)),
    )
    own = loaderd.TLS(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key)
    with loaderd.connect(server.address, "train", batch_size=100, workers=1, token=TOKEN, tls=own) as loader:
        assert sum(batch.num_records for batch in loader) == 1000
    with pytest.raises(ServerError, match="refuses the token"):
        datasets(server, token="wrong", tls=own)
    strange = loaderd.TLS(ca=certificates.ca, cert=certificates.other_ca, key=certificates.other_ca[:-3] + "key")
    for wrong in (tls, strange):
        error = refused(server, token=TOKEN, tls=wrong)
        assert "refuses the connection" in error.message and "TLS(cert=…, key=…)" in error.hint


def test_a_full_server_is_not_taken_for_one_that_refuses_a_certificate(start_server, certificates, tls):
    secrets = ("--tls-cert", certificates.server_cert, "--tls-key", certificates.server_key)
    server = start_server(*secrets, "--max-connections", "2")
    context = ssl.create_default_context(cafile=certificates.ca)

    def is_full() -> bool:
        """Whether it says so, now that there is one request more that does not end."""
        raw = others.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        with contextlib.suppress(OSError):
            sock = others.enter_context(context.wrap_socket(raw, server_hostname="localhost"))
            sock.sendall(b"POST /v1/train/rows HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        try:
            Calls(server.address, Settings(tls=tls)).status(5.0)
        except OutOfReach as error:
            return "status 503" in str(error)
        return False

    with contextlib.ExitStack() as others:
        wait_until(is_full)


def test_who_has_had_an_answer_asks_again_where_connections_end(certificates, tls):
    """A server does not take back that it trusts a certificate: it is full, and ends idle connections."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)

    def end_each() -> None:
        with contextlib.suppress(OSError):
            while True:
                context.wrap_socket(listener.accept()[0], server_side=True).close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=end_each, daemon=True).start()
        calls = Calls(f"https://localhost:{listener.getsockname()[1]}", Settings(tls=tls))
        with pytest.raises(ServerError, match="ends each one without a word"):
            calls.status(5.0)
        with pytest.raises(OutOfReach, match="ended the connection"):
            calls.rows("train", RowsTicket("x", np.array([[0, 0, 0, 1]])), 8, 5.0)
        listener.shutdown(socket.SHUT_RDWR)


def test_certificates_that_cannot_be_used(server, tmp_path):
    for name in ("none.pem", "empty.pem"):
        (tmp_path / "empty.pem").write_text("nothing")
        with pytest.raises(OptionError, match=rf"{name}.*cannot be used"):
            datasets(server, token=TOKEN, tls=loaderd.TLS(ca=tmp_path / name))


def test_certificates_with_which_no_server_starts(server, certificates, tmp_path):
    (tmp_path / "empty.pem").write_text("nothing")
    for key, words in (
        (tmp_path / "empty.pem", "must be a certificate and its private key, PEM, without a passphrase"),
        (certificates.client_key, "key values mismatch"),
    ):
        options = ["--tls-cert", certificates.server_cert, "--tls-key", key]
        done = run("serve", "datasets_of_test:train", "--listen", "127.0.0.1:0", *options, folder=server.folder)
        assert done.returncode and words in done.stderr


def test_an_address_that_is_taken(server):
    done = run("serve", "datasets_of_test:train", "--listen", f"127.0.0.1:{server.port}", folder=server.folder)
    assert done.returncode and f"cannot listen at 127.0.0.1:{server.port}" in done.stderr


@pytest.mark.parametrize("token", ["", "  \n", "two words", "a\nb", "tökén", None])
def test_what_is_no_token(token):
    with pytest.raises(OptionError, match="must hold a token"):
        check_token(token, "the file")


def test_where_the_token_comes_from(tmp_path, monkeypatch):
    monkeypatch.delenv("LOADERD_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("LOADERD_TOKEN", " of-the-environment\n")
    assert read_token(None) == "of-the-environment"
    monkeypatch.setenv("LOADERD_TOKEN", "")
    with pytest.raises(OptionError, match=r"\$LOADERD_TOKEN must hold a token"):
        read_token(None)
    path = tmp_path / "token"
    with pytest.raises(OptionError, match="cannot be read"):
        read_token(path)
    path.write_text("of-the-file\n")
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(OptionError, match=f"must be for its owner alone, got mode {mode:04o}") as caught:
            read_token(path)
        assert f"chmod 600 {path}" in caught.value.hint
    path.chmod(0o600)
    assert read_token(path) == "of-the-file"
    path.write_text("one\n\n two \n")
    assert read_tokens(path) == ["one", "two"]
    for text in ("", "\n \n"):  # it may be written at this moment; to need no token would open the server to all
        path.write_text(text)
        with pytest.raises(OptionError, match="has no token"):
            read_tokens(path)
    path.write_text("one\ntwo words\n")
    with pytest.raises(OptionError, match="must hold a token"):
        read_tokens(path)
