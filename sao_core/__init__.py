"""SAO as a library: torch in, numbers out.

Knows no Prefect, MLflow, SQL, object store or environment variable; what the loops need from
outside stands in :mod:`sao_core.protocols`.
"""
