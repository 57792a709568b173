"""What Prefect and MLflow answer is told apart: away, a login, a host name, another program, a fault of their own."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from outages import Silent, free_port

from infra import reach
from infra.reach import ServerRefused, ServerUnusable
from infra.settings import Logins, Settings

SECRET = "s3cret"
NOBODY = Logins()
SOMEBODY = Logins(prefect=f"admin:{SECRET}", mlflow=f"admin:{SECRET}")


class Server(ThreadingHTTPServer):
    """Answers every POST as `reply` says, and remembers what it was asked."""

    reply: Callable[[str], tuple[int, str]] = staticmethod(lambda path: (200, "[]"))
    asked: list[tuple[str, dict[str, str], Any]]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def server() -> Iterator[Server]:
    class Answer(BaseHTTPRequestHandler):
        server: Server

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, dict(self.headers), body))
            status, text = self.server.reply(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Answer)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


@pytest.fixture
def settings(server: Server, tmp_path: Path) -> Settings:
    variables = {"PREFECT_API_URL": f"{server.url}/api", "MLFLOW_TRACKING_URI": server.url}
    return Settings.from_environment(variables, tmp_path)


def test_logins_come_from_the_usual_variables_and_are_never_shown() -> None:
    variables = {
        "PREFECT_API_AUTH_STRING": f"admin:{SECRET}",
        "MLFLOW_TRACKING_USERNAME": "admin",
        "MLFLOW_TRACKING_PASSWORD": SECRET,
        "MLFLOW_TRACKING_TOKEN": SECRET,
    }
    logins = Logins.from_environment(variables)
    assert logins == replace(SOMEBODY, mlflow_token=SECRET)
    assert SECRET not in repr(logins)
    assert Logins.from_environment({}) == NOBODY


CHECKS = pytest.mark.parametrize("check", [reach.prefect, reach.mlflow])


def test_they_are_asked_what_their_clients_ask_with_the_login(server: Server, settings: Settings) -> None:
    assert reach.prefect(settings, SOMEBODY) == f"{server.url}/api"
    assert reach.mlflow(settings, SOMEBODY) == server.url
    login = f"Basic {b64encode(f'admin:{SECRET}'.encode()).decode()}"
    assert [(path, headers["Authorization"]) for path, headers, _ in server.asked] == [
        ("/api/flow_runs/filter", login),
        ("/api/2.0/mlflow/experiments/search", login),
    ]


@CHECKS
def test_a_login_in_the_address_is_used_and_never_shown(server: Server, settings: Settings, check: Any) -> None:
    address = server.url.replace("//", f"//user:{SECRET}%40@")
    settings = replace(settings, prefect_api_url=f"{address}/api", tracking_uri=address)
    assert SECRET not in check(settings, NOBODY)
    assert server.asked[0][1]["Authorization"] == f"Basic {b64encode(f'user:{SECRET}@'.encode()).decode()}"
    server.reply = lambda path: (401, "")
    with pytest.raises(ServerRefused) as error:
        check(settings, NOBODY)
    assert SECRET not in str(error.value)


@CHECKS
@pytest.mark.parametrize(
    ("logins", "said"),
    [(NOBODY, "asks for a user name and a password"), (SOMEBODY, "refuses the user name or password")],
)
def test_a_wrong_password_is_told_from_a_missing_one(
    server: Server, settings: Settings, check: Any, logins: Logins, said: str
) -> None:
    server.reply = lambda path: (401, "")
    variable = "PREFECT_API_AUTH_STRING" if check is reach.prefect else "MLFLOW_TRACKING_USERNAME"
    with pytest.raises(ServerRefused, match=rf"at http://127.0.0.1:\d+\S* {said}: set the right ones in {variable}"):
        check(settings, logins)


def test_a_refused_host_name_is_told_from_a_lack_of_rights(server: Server, settings: Settings) -> None:
    server.reply = lambda path: (403, "Invalid Host header - possible DNS rebinding attack detected")
    host = server.url.removeprefix("http://")
    with pytest.raises(ServerRefused, match=f"refuses to be called {host}: start it with --allowed-hosts {host}"):
        reach.mlflow(settings, SOMEBODY)
    server.reply = lambda path: (403, "Permission denied")
    with pytest.raises(ServerRefused, match="forbids this user to do that"):
        reach.mlflow(settings, SOMEBODY)


@CHECKS
def test_a_fault_of_the_server_and_another_program_are_told_apart(
    server: Server, settings: Settings, check: Any
) -> None:
    server.reply = lambda path: (500, "")
    with pytest.raises(ServerUnusable, match="answers with error 500: look at its log") as fault:
        check(settings, NOBODY)
    assert not isinstance(fault.value, ServerRefused)
    for other in ((404, "not here"), (200, "<html>welcome</html>")):
        server.reply = lambda path, other=other: other  # type: ignore[misc]
        with pytest.raises(ServerRefused, match=rf"is not (Prefect|MLflow) \({other[0]}\): correct"):
            check(settings, NOBODY)


@CHECKS
def test_a_server_that_is_away_or_silent_is_said_not_to_be_reached(
    settings: Settings, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "FIRST_CONTACT_S", 0.3)
    with Silent() as silent:
        for url in (silent.url, f"http://127.0.0.1:{free_port()}", "http://no-such-host.invalid"):
            places = replace(settings, prefect_api_url=url, tracking_uri=url)
            with pytest.raises(ServerUnusable, match=rf"{url} cannot be reached \(.+\): is it running"):
                check(places, NOBODY)


def test_workers_are_those_online(server: Server, settings: Settings) -> None:
    server.reply = lambda path: (200, '[{"name": "b", "status": "ONLINE"}, {"name": "a", "status": "OFFLINE"}]')
    assert reach.workers(settings, NOBODY, "sao") == "b"
    assert server.asked[0][0] == "/api/work_pools/sao/workers/filter"
    server.reply = lambda path: (200, "[]")
    with pytest.raises(ServerUnusable, match="no worker is online in the work pool sao"):
        reach.workers(settings, NOBODY, "sao")


def test_an_event_that_does_not_arrive_names_the_services(
    server: Server, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda path: (204, "") if path.endswith("/events") else (200, '{"events": []}')
    monkeypatch.setattr(reach, "EVENT_S", 0.1)
    with pytest.raises(ServerUnusable, match="take no events"):
        reach.events(settings, NOBODY)
    sent = server.asked[0][2][0]["id"]
    assert server.asked[1][2]["filter"]["id"]["id"] == [sent]
    server.reply = lambda path: (204, "") if path.endswith("/events") else (200, '{"events": [{}]}')
    assert "an event arrived" in reach.events(settings, NOBODY)


def test_a_training_goes_on_without_mlflow_but_not_with_a_wrong_password(server: Server, settings: Settings) -> None:
    warned: list[str] = []
    away = replace(settings, tracking_uri=f"http://127.0.0.1:{free_port()}")
    reach.require(away, SOMEBODY, tracking=True, say=warned.append)
    assert "cannot be reached" in warned[0]
    assert "sao sync" in warned[0]
    reach.require(away, SOMEBODY, tracking=False, say=warned.append)
    assert len(warned) == 1
    server.reply = lambda path: (401, "") if "mlflow" in path else (200, "[]")
    with pytest.raises(ServerRefused, match="MLflow"):
        reach.require(settings, SOMEBODY, tracking=True, say=warned.append)
