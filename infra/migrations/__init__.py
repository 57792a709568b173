"""The ledger's schema through time (Alembic)."""
