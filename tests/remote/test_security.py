"""Who is let in, and who is believed: tokens and certificates, with real processes, and what is said of others."""

from __future__ import annotations

import json
import socket
import threading

import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import OptionError, ServerError
from loaderd.remote.security import check_token, is_bearer, probe, read_token
from tests.helpers.commands import run

TOKEN = "n0t-f0r-everybody"


def datasets(server, address=None, **options):
    report = ask_status(address or server.address, **options)
    return [each["name"] for each in report["datasets"]]


@pytest.fixture(scope="module")
def server(start_shared_server, certificates):
    return start_shared_server(tls_cert=certificates.server_cert, tls_key=certificates.server_key, token=TOKEN)


@pytest.fixture(scope="module")
def tls(certificates):
    return loaderd.TLS(ca=certificates.ca)


def test_who_has_the_token_gets_batches(server, tls, monkeypatch):
    with loaderd.connect(server.address, dataset="train", batch_size=100, token=TOKEN, tls=tls) as loader:
        assert sum(batch.num_records for batch in loader) == 1000
    monkeypatch.setenv("LOADERD_TOKEN", TOKEN)
    with loaderd.connect(server.address, dataset="train", batch_size=100, tls=tls) as loader:
        assert sum(batch.num_records for batch in loader) == 1000


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_commands_show_the_token_and_believe_the_ca_that_they_are_given(command, server, certificates, tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    options = [command, server.address, "--json", "--token-file", tmp_path / "token"]
    with loaderd.connect(server.unix_address, dataset="train", batch_size=100, name="trainer") as loader:
        next(iter(loader))
        said = json.loads(run(*options, "--tls-ca", certificates.ca).stdout)
        assert "trainer" in (said[0]["who"] if command == "doctor" else said["consumers"][0]["name"])
        for wrong, why in (
            (["--tls-ca", certificates.other_ca], "is not trusted"),
            (["--tls-cert", certificates.client_cert], "TLS.cert and TLS.key belong together"),
        ):
            done = run(*options, *wrong)
            assert done.returncode and why in done.stderr


@pytest.mark.one_variant
@pytest.mark.parametrize("token", [None, "wrong", TOKEN[:-1], TOKEN + "x"])
def test_another_token_is_refused(server, tls, token):
    with pytest.raises(ServerError, match="refuses the token") as caught:
        loaderd.connect(server.address, dataset="train", batch_size=100, token=token, tls=tls)
    assert "LOADERD_TOKEN" in caught.value.hint
    assert TOKEN not in str(caught.value)


def test_the_name_may_be_said(server, certificates):
    by_name = server.address.replace("127.0.0.1", "localhost")
    assert datasets(server, by_name, token=TOKEN, tls=loaderd.TLS(ca=certificates.ca)) == ["train"]
    named = loaderd.TLS(ca=certificates.ca, server_name="localhost")
    assert datasets(server, token=TOKEN, tls=named) == ["train"]
    other = loaderd.TLS(ca=certificates.ca, server_name="other.example")
    with pytest.raises(ServerError, match=r"not trusted: Hostname mismatch.*'other.example'"):
        datasets(server, token=TOKEN, tls=other)


def test_a_certificate_of_somebody_else(server, certificates):
    with pytest.raises(ServerError, match=r"is not trusted: .*certificate") as caught:
        datasets(server, token=TOKEN, tls=loaderd.TLS(ca=certificates.other_ca))
    assert certificates.other_ca in caught.value.hint
    with pytest.raises(ServerError, match=r"is not trusted: .*certificate"):
        datasets(server, token=TOKEN)


def test_an_expired_certificate(start_server, certificates, tls):
    server = start_server(tls_cert=certificates.expired, tls_key=certificates.server_key)
    with pytest.raises(ServerError, match="is not trusted: certificate has expired"):
        datasets(server, tls=tls)


def test_tls_on_one_side_only(server, start_server, tls):
    plain = start_server()
    with pytest.raises(ServerError, match=r"the TLS handshake with .* failed: "):
        datasets(plain, plain.address.replace("grpc", "grpc+tls"), tls=tls)
    with pytest.raises(ServerError, match="Maybe it speaks TLS"):
        datasets(server, server.address.replace("grpc+tls", "grpc"), token=TOKEN)


def test_a_proxy_whose_server_is_away_is_called_again(tls):
    """It takes the connection, and ends it in the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def answer():
            connection, _ = proxy.accept()
            with connection:
                connection.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="ended the connection in the TLS handshake"):
            probe("127.0.0.1", proxy.getsockname()[1], tls)
        thread.join()


def test_a_server_that_asks_for_a_certificate(start_server, certificates, tls):
    server = start_server(
        tls_cert=certificates.server_cert,
        tls_key=certificates.server_key,
        tls_client_ca=certificates.ca,
        token=TOKEN,
    )
    own = loaderd.TLS(ca=certificates.ca, cert=certificates.client_cert, key=certificates.client_key)
    assert datasets(server, token=TOKEN, tls=own) == ["train"]
    with pytest.raises(ServerError, match="refuses the token"):
        datasets(server, token="wrong", tls=own)
    with pytest.raises(ServerError, match=r"ended the connection without a word.*TLS\(cert=…, key=…\)"):
        datasets(server, token=TOKEN, tls=tls)
    strange = loaderd.TLS(ca=certificates.ca, cert=certificates.other_ca, key=certificates.other_ca[:-3] + "key")
    with pytest.raises(ServerError, match="ended the connection"):
        datasets(server, token=TOKEN, tls=strange)


def test_certificates_that_cannot_be_used(server, certificates, tmp_path):
    with pytest.raises(OptionError, match=r"cannot read .*none\.pem"):
        datasets(server, token=TOKEN, tls=loaderd.TLS(ca=tmp_path / "none.pem"))
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(OptionError, match="cannot be used"):
        datasets(server, token=TOKEN, tls=loaderd.TLS(ca=tmp_path / "empty.pem"))
    for settings in ({"tls_cert": certificates.server_cert, "tls_key": str(tmp_path / "empty.pem")},):
        with pytest.raises(OptionError, match="cannot listen"):
            server.start_gateway(**settings)
    with pytest.raises(OptionError, match="cannot read"):
        server.start_gateway(tls_cert=str(tmp_path / "none.pem"), tls_key=certificates.server_key)


def test_an_address_that_is_taken(server):
    with pytest.raises(OptionError, match=f"cannot listen at 127.0.0.1:{server.port}"):
        server.start_gateway(port=server.port)


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


def test_the_header():
    assert check_token(" abc\n", "the file") == "abc"
    assert is_bearer("Bearer abc", "abc")
    for header in ("", "abc", "bearer abc", "Bearer abcd", "Bearer ab", "Bearer äbc", "Bearer \ud800"):
        assert not is_bearer(header, "abc")
