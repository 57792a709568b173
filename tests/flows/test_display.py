import io
import json
import os
import subprocess

from rich.console import Console

from flows.display import LiveProgress, duration, headline, links, sparkline
from flows.links import mlflow_page
from infra.ledger import Ledger
from infra.settings import Settings

CONFIG = {"learner": {"updates": 4}, "rollout": {"max_attempts": 3}}


def places(tmp_path):
    return Settings.from_environment({}, directory=tmp_path)


def test_the_panel_shows_what_the_learner_is_at_before_the_first_update(tmp_path):
    ledger = Ledger(places(tmp_path).database_url)
    ledger.create_run("r", "tiny", "sao", CONFIG)
    ledger.begin_attempt("r")
    ledger.heartbeat("r", "learner-1", "warm start 3/9", None, "host", 1, 30.0)
    console = Console(force_terminal=True, width=100, file=io.StringIO())
    console.print(LiveProgress(ledger, "r", console)._panel())
    assert "warm start 3/9" in console.file.getvalue()


def test_plain_lines_say_each_update_once(tmp_path):
    ledger = Ledger(places(tmp_path).database_url)
    ledger.create_run("r", "tiny", "sao", CONFIG)
    console = Console(force_terminal=False, width=200, file=io.StringIO())
    with LiveProgress(ledger, "r", console):
        pass
    assert console.file.getvalue().splitlines() == ["starting"]


def test_a_run_links_to_pages_that_answer_and_says_how_to_get_the_others(tmp_path):
    ledger = Ledger(places(tmp_path).database_url)
    ledger.create_run("r", "tiny", "sao", CONFIG)
    ledger.set_run_links("r", mlflow_run_id="abc", prefect_flow_run_id="def")
    alone = links(ledger, places(tmp_path), "r")
    assert "abc; `sao up` serves the pages" in alone
    assert "http" not in alone
    _announce(tmp_path, "mlflow", 5001)
    assert "http://127.0.0.1:5001/#/runs/abc" in links(ledger, places(tmp_path), "r")
    variables = {"MLFLOW_TRACKING_URI": "http://mlflow:80/", "PREFECT_API_URL": "http://prefect:4200/api"}
    remote = links(ledger, Settings.from_environment(variables, directory=tmp_path), "r")
    assert "http://mlflow:80/#/runs/abc" in remote
    assert "http://prefect:4200/runs/flow-run/def" in remote


def test_a_server_that_is_gone_is_no_link(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    _announce(tmp_path, "mlflow", 5001, gone.pid)
    assert mlflow_page(places(tmp_path)) is None


def _announce(folder, name, port, pid=None):
    """As a running service does."""
    file = folder / ".sao" / "services" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"port": port, "keeper_pid": pid or os.getpid()}))


def test_the_headline_leaves_out_what_is_undefined():
    assert headline({"reward/mean": 0.5, "staleness/mean": 1.0}) == {"reward": "0.500", "staleness": "1.00"}


def test_durations_and_sparklines():
    assert (duration(61), duration(3725)) == ("1:01", "1:02:05")
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
