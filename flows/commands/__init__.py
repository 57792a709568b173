"""Commands of `sao` that are about an installation, its team and its models, rather than about a run."""
