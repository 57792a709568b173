"""The `writing` environment: a text whose preferred style changes while the policy trains."""

from sao_core.environments.writing.environment import SPEC

__all__ = ["SPEC"]
