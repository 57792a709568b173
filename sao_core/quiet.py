"""Keeps other libraries' progress bars and start-up chatter off the console; their errors still come through."""

from __future__ import annotations

import logging

from transformers.utils import logging as transformers_logging


def quiet_libraries() -> None:
    """Switch off Transformers' progress bars and DeepSpeed's messages below ERROR. Calling it again is harmless."""
    transformers_logging.disable_progress_bar()
    logger = logging.getLogger("DeepSpeed")
    if _errors_only not in logger.filters:
        logger.addFilter(_errors_only)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
