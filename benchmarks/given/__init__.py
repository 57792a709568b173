"""What several benchmarks start from: a Postgres, an S3, a run in a ledger, trajectories with realistic contents."""
