"""Runs: created once, started again, watched; and the schema underneath."""

from __future__ import annotations

import multiprocessing
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from infra_fixtures import make, prompts, start_run, train
from sqlalchemy import text

from infra.ledger import Ledger, LedgerError, LedgerTooNew, RunStatus, UnknownRun
from infra.ledger.database import ledger_url
from infra.ledger.schema import HEAD, MIGRATIONS
from infra.models import Base


def test_a_run_is_created_once(ledger: Ledger) -> None:
    name = f"run-{secrets.token_hex(4)}"
    assert not ledger.has_run(name)
    assert ledger.create_run(name, "tiny", "sao", {"seed": 3})
    assert not ledger.create_run(name, "other", "grpo", {})
    run = ledger.run(name)
    assert (run.recipe, run.algorithm, run.config, run.status) == ("tiny", "sao", {"seed": 3}, RunStatus.RUNNING)
    assert (run.attempt, run.step, run.ended_at) == (0, 0, None)
    assert abs(run.created_at - time.time()) < 60
    with pytest.raises(UnknownRun, match="nobody"):
        ledger.run("nobody")


def test_runs_come_newest_first_with_their_step(ledger: Ledger) -> None:
    first, second = start_run(ledger), start_run(ledger)
    ledger.issue(first, prompts(1))
    make(ledger, first, 1)
    train(ledger, first, 1, 1)
    assert [(run.run_id, run.step) for run in ledger.runs(limit=2)] == [(second, 0), (first, 1)]


def test_status_and_links_are_kept(ledger: Ledger, run: str) -> None:
    ledger.set_run_links(run, mlflow_run_id="m1")
    ledger.set_run_links(run, prefect_flow_run_id="p1")
    ledger.set_status(run, "failed", "learner died")
    record = ledger.run(run)
    assert (record.status, record.message) == (RunStatus.FAILED, "learner died")
    assert (record.mlflow_run_id, record.prefect_flow_run_id) == ("m1", "p1")
    assert record.ended_at is not None
    assert ledger.begin_attempt(run) == 2
    record = ledger.run(run)
    assert (record.status, record.message, record.ended_at) == (RunStatus.RUNNING, "", None)
    with pytest.raises(ValueError, match="done"):
        ledger.set_status(run, "done")


def test_watermarks_never_move_back(ledger: Ledger, run: str) -> None:
    assert (ledger.watermark(run), ledger.watermark(run, "evaluation")) == (-1, 0)
    ledger.set_watermark(run, 7)
    ledger.set_watermark(run, 4)
    ledger.set_watermark(run, 2, "evaluation")
    assert (ledger.watermark(run), ledger.watermark(run, "evaluation")) == (7, 2)


def test_stages_keep_their_figures(ledger: Ledger, run: str) -> None:
    ledger.set_stage_metrics(run, "warm_start", {"loss": 0.5})
    ledger.set_stage_metrics(run, "value_pretraining", {"explained_variance": 0.2})
    ledger.set_stage_metrics(run, "warm_start", {"loss": 0.4})
    assert ledger.stage_metrics(run)["warm_start"] == {"loss": 0.4}
    assert ledger.stage_metrics(run)["value_pretraining"] == {"explained_variance": 0.2}


def test_progress_is_what_happened_last_and_no_heartbeat(ledger: Ledger, run: str) -> None:
    ledger.issue(run, prompts(2))
    before = ledger.progress(run)
    ledger.heartbeat(run, "w", "stuck", 0, "host", 1, 30.0)
    assert ledger.progress(run) == before
    make(ledger, run, 1)
    recorded = ledger.progress(run)
    assert (recorded.kind, recorded.at > before.at) == ("rollout recorded", True)
    train(ledger, run, 1, 1)
    assert ledger.progress(run).kind in {"update committed", "policy published"}
    assert 0 <= ledger.progress(run).idle_s < 10


def test_the_migrated_schema_is_that_of_the_models(ledger: Ledger) -> None:
    with ledger.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == HEAD


def test_a_ledger_that_a_newer_version_wrote_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = Ledger(url)
    with ledger.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(LedgerTooNew, match=r"schema 9999.*upgrade sao-pipeline"):
        Ledger(url)


def test_only_a_file_or_postgres_can_be_a_ledger() -> None:
    for url in ("sqlite://", "mysql://host/db"):
        with pytest.raises(LedgerError, match="SQLite file or Postgres"):
            ledger_url(url)
    for url in ("postgres://u:p@host/db", "postgresql://u:p@host/db"):
        assert str(ledger_url(url)) == "postgresql+psycopg://u:***@host/db"
    assert Ledger.label_of("postgresql://u:secret@host/db") == "postgresql://u:***@host/db"


def test_opening_a_migrated_ledger_needs_no_alembic(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url)
    code = f"import sys; from infra.ledger import Ledger; Ledger({url!r}); print('alembic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_processes_that_open_a_new_ledger_at_once_migrate_it_once(
    tmp_path: Path, new_postgres_database: Callable[[], str]
) -> None:
    for url in (f"sqlite:///{tmp_path / 'new' / 'ledger.db'}", new_postgres_database()):
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=Ledger, args=(url,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0]
        assert Ledger(url).runs() == []


def test_an_operation_outlives_a_restart_of_the_database(postgres_url: str) -> None:
    ledger, other = Ledger(postgres_url, patience_s=5.0), Ledger(postgres_url)
    run = start_run(ledger)
    with other.engine.begin() as connection:
        killed = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid()"
        assert connection.exec_driver_sql(killed).fetchall()
    assert ledger.issue(run, prompts(2), frontier=0) == [0, 1]
    assert ledger.prompts_issued(run) == 2
