import io

from rich.console import Console

from flows.display import LiveProgress, duration, headline, links, sparkline
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


def test_a_run_links_to_its_mlflow_page(tmp_path):
    ledger = Ledger(places(tmp_path).database_url)
    ledger.create_run("r", "tiny", "sao", CONFIG)
    ledger.set_run_links("r", mlflow_run_id="abc")
    local = links(ledger, places(tmp_path), "r")
    assert "http://127.0.0.1:5000/#/runs/abc" in local
    assert "mlflow server --port 5000 --backend-store-uri sqlite:///" in local
    remote = Settings.from_environment({"MLFLOW_TRACKING_URI": "http://mlflow:80/"}, directory=tmp_path)
    assert "http://mlflow:80/#/runs/abc" in links(ledger, remote, "r")


def test_the_headline_leaves_out_what_is_undefined():
    assert headline({"reward/mean": 0.5, "staleness/mean": 1.0}) == {"reward": "0.500", "staleness": "1.00"}


def test_durations_and_sparklines():
    assert (duration(61), duration(3725)) == ("1:01", "1:02:05")
    assert sparkline([0.0, 0.5, 1.0]) == "▁▄█"
