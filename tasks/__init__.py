"""WHAT: Prefect tasks, one verb each: arguments → a call into sao_core and infra → small results."""
