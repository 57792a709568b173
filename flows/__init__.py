"""WHEN: Prefect flows compose tasks into a training run, an evaluation, a study. No arithmetic, no SQL."""
