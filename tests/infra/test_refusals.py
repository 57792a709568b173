"""A database or store that does not let us in is said to at once, with what, where and what to try, and no password."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from outages import free_port
from sqlalchemy import URL, create_engine, make_url, text

from infra.ledger import Ledger, LedgerError, LedgerRefused
from infra.ledger.database import ledger_url
from infra.objects import BucketMissing, ObjectStore, ObjectStoreError, StoreRefused
from infra.refusals import without_password

WRONG = "wr0ng-and-secret"


@pytest.fixture(scope="module")
def guarded(postgres_url: str) -> Iterator[URL]:
    """A database whose owner needs the password `right`."""
    name = f"guarded_{secrets.token_hex(4)}"
    admin = create_engine(ledger_url(postgres_url), isolation_level="AUTOCOMMIT")
    hba = Path(str(make_url(postgres_url).query["host"])) / "pg_hba.conf"
    before = hba.read_text()
    with admin.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'right'"))
        connection.execute(text(f"CREATE DATABASE {name} OWNER {name}"))
        connection.execute(text(f"REVOKE ALL ON DATABASE {name} FROM PUBLIC"))
        hba.write_text(f"local all {name} scram-sha-256\n{before}")
        connection.execute(text("SELECT pg_reload_conf()"))
        yield ledger_url(postgres_url).set(username=name, database=name, password="right")
        hba.write_text(before)
        connection.execute(text("SELECT pg_reload_conf()"))


def opened(url: URL) -> str:
    """What opening a ledger says, within moments although it would be waited for longer."""
    began = time.monotonic()
    with pytest.raises(LedgerRefused) as refused:
        Ledger(url.render_as_string(hide_password=False), patience_s=60.0)
    assert time.monotonic() - began < 5
    said = str(refused.value)
    assert WRONG not in said
    assert "right" not in said.replace("set the right one", "")
    assert "\n" not in said
    assert re.search(r"the ledger postgresql\+psycopg://.* SAO_DATABASE_URL", said)
    return said


def test_a_wrong_password_is_said_to_be_one(guarded: URL) -> None:
    said = opened(guarded.set(password=WRONG))
    assert f"refuses the password of {guarded.username}: set the right one in SAO_DATABASE_URL (or PGPASSWORD)" in said


def test_a_missing_password_user_or_database_is_named(guarded: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    assert "asks for a password: set it in" in opened(guarded._replace(password=None))
    assert "knows no user nobody: create it, or correct the name" in opened(guarded.set(username="nobody"))
    missing = f"missing_{secrets.token_hex(4)}"
    assert f"has no database {missing}: create it (createdb {missing})" in opened(guarded.set(database=missing))


def test_a_user_without_rights_is_told_which(guarded: URL, postgres_url: str) -> None:
    stranger = f"stranger_{secrets.token_hex(4)}"
    with create_engine(ledger_url(postgres_url), isolation_level="AUTOCOMMIT").connect() as admin:
        admin.execute(text(f"CREATE ROLE {stranger} LOGIN"))
        assert "does not let this user connect: grant it CONNECT" in opened(guarded.set(username=stranger))
        admin.execute(text(f"GRANT CONNECT ON DATABASE {guarded.database} TO {stranger}"))
    said = opened(guarded.set(username=stranger))
    assert "forbids it (permission denied for schema public): use the database's owner in" in said


def test_a_password_in_the_environment_is_enough(guarded: URL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", "right")
    ledger = Ledger(guarded._replace(password=None).render_as_string(hide_password=False))
    assert ledger.runs() == []
    ledger.close()


@pytest.mark.parametrize(
    "host", [f"127.0.0.1:{free_port()}", "no-such-host.invalid:5432"], ids=["nothing listens", "no such host"]
)
def test_a_database_that_is_not_there_is_named_within_the_first_contact(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LedgerError, match=r"could not be reached for 0 s .*: is the database running") as away:
        Ledger(f"postgresql://u:{WRONG}@{host}/x", first_contact_s=0.3)
    assert WRONG not in str(away.value)
    assert "\n" not in str(away.value)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_url_that_is_none_is_explained_without_its_password() -> None:
    with pytest.raises(LedgerError, match="%2F %3A %40") as wrong:
        Ledger(f"postgresql://u:{WRONG}@host:{WRONG}/x")
    assert WRONG not in str(wrong.value)


def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("dear diary, " * 100)
    with pytest.raises(LedgerRefused, match=r"notes\.txt is not a SQLite file"):
        Ledger(f"sqlite:///{tmp_path / 'notes.txt'}")
    with pytest.raises(LedgerRefused, match=r"needs the folder .*notes\.txt: .*SAO_HOME"):
        Ledger(f"sqlite:///{tmp_path / 'notes.txt' / 'ledger.db'}")


ANSWER = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>said by the store</Message><RequestId>1</RequestId></Error>"""


@pytest.fixture
def refusing() -> Iterator[ThreadingHTTPServer]:
    """A store that answers everything with the error `server.code`, as S3 writes it."""

    class Refuse(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # with it, a client that asks first may send what it has

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = ANSWER.format(code=self.server.code).encode()  # type: ignore[attr-defined]
            self.send_response(403)
            self.send_header("Connection", "close")
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("InvalidAccessKeyId", "does not know the access key: set the right AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", "refuses the secret key: set the right AWS_SECRET_ACCESS_KEY"),
        ("AccessDenied", "lets this key not do that: let it read, write, list and delete in b"),
        ("RequestTimeTooSkewed", "this machine's clock is wrong"),
    ],
)
def test_a_store_that_refuses_the_key_says_which_half(
    refusing: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    refusing.code = code  # type: ignore[attr-defined]
    store = ObjectStore("s3://b/p", endpoint_url=f"http://127.0.0.1:{refusing.server_port}")
    began = time.monotonic()
    for call in (store.meet, lambda: store.put("x", b"1"), lambda: store.keys("runs")):
        with pytest.raises(StoreRefused, match=rf"the object store s3://b/p at http://127.0.0.1:\d+ .*{said}") as error:
            call()
        assert WRONG not in str(error.value)
    assert time.monotonic() - began < 10


def test_a_store_without_a_key_asks_for_one(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreRefused, match="asks for a key: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        ObjectStore("s3://sao/p", endpoint_url=s3_endpoint).meet()


def test_a_missing_bucket_is_named_and_can_be_made_once(s3_endpoint: str) -> None:
    bucket = f"new-{secrets.token_hex(4)}"
    store = ObjectStore(f"s3://{bucket}/p", endpoint_url=s3_endpoint)
    with pytest.raises(BucketMissing, match=f"has no bucket {bucket}: create it with `sao bootstrap`"):
        store.put("x", b"1")
    assert store.make_bucket()
    assert not store.make_bucket()
    store.put("x", b"1")
    assert store.exists("x")
    assert not store.exists("y")


def test_a_store_that_is_away_is_not_taken_for_an_empty_one(s3_endpoint: str) -> None:
    store = ObjectStore("s3://sao/p", endpoint_url=f"http://127.0.0.1:{free_port()}", patience_s=0.0)
    with pytest.raises(
        ObjectStoreError, match=r"cannot be used \(x: .*\): is it running, and is AWS_ENDPOINT_URL right"
    ):
        store.exists("x")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hush@h:5/d", "postgresql://u:***@h:5/d"),
        ("postgresql://u@h/d?password=hush&sslmode=require", "postgresql://u@h/d?sslmode=require"),
        ("http://u:hush@h:5000/x", "http://h:5000/x"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("s3://b/p", "s3://b/p"),
        ("u:hush@h", "h"),
    ],
)
def test_no_place_is_shown_with_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
