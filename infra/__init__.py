"""WHERE: the world outside: settings, SQL ledger, object store, policies, checkpoints, MLflow, processes, services."""
