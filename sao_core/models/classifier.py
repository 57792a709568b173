"""A sequence classifier on disk as a judge of conversations: an ordinary Hugging Face folder, e.g. a reward model.

Renders a conversation as the classifier's own tokenizer does, and gives logits. Never downloads, never runs code from
a folder, never reads a pickle; it does not know what the logits mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sao_core.config import ConfigError
from sao_core.models.folder import check_classifier_folder
from sao_core.models.policy import resolve_device
from sao_core.quiet import quiet_libraries
from sao_core.trajectory import Message

_NO_LIMIT = 10**9
"""Tokenizers without a limit of their own name one that is larger."""


class Classifier:
    """Scores conversations; not for two threads at a time.

    Where the tokenizer has a chat template, the conversation is rendered by it; otherwise prompt and reply are given as
    a pair of texts. What is too long for the model loses its beginning.
    """

    def __init__(self, folder: str, device: str = "auto", reply_only: bool = False) -> None:
        """Load model and tokenizer; raises ConfigError if the folder is no sequence classifier with all its weights."""
        check_classifier_folder(folder)
        quiet_libraries()
        place = Path(folder).expanduser()
        self._device = resolve_device(device)
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                place,
                dtype=torch.float32 if self._device.type == "cpu" else "auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(place, local_files_only=True, truncation_side="left")
        except (OSError, ValueError, RuntimeError) as error:
            line = str(error).strip().partition("\n")[0]
            raise ConfigError(f"classifier {folder} could not be loaded: {line}") from error
        if report["missing_keys"]:
            raise ConfigError(f"classifier {folder} lacks weights, first {min(report['missing_keys'])}")
        self._model = model.to(self._device).eval()
        self._reply_only = reply_only
        self._pads = self._agree_on_padding()
        limits = (self._tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
        self._longest = min((limit for limit in limits if limit and limit < _NO_LIMIT), default=None)

    def logits(self, conversations: Sequence[Sequence[Message]]) -> list[tuple[float, ...]]:
        """Logits by label of each conversation, which ends in the reply that is judged."""
        encoded = [self._encode(conversation) for conversation in conversations]
        batches = [encoded] if self._pads else [[one] for one in encoded]
        return [row for batch in batches for row in self._forward(batch)]

    @torch.inference_mode()
    def _forward(self, encoded: Sequence[Any]) -> list[tuple[float, ...]]:
        if self._pads:
            batch = dict(self._tokenizer.pad(encoded, return_tensors="pt"))
        else:
            batch = {name: torch.tensor([values]) for name, values in encoded[0].items()}
        logits = self._model(**{name: tensor.to(self._device) for name, tensor in batch.items()}).logits.float()
        return [tuple(row) for row in logits.tolist()]

    def _encode(self, conversation: Sequence[Message]) -> Any:
        reply = conversation[-1].content
        cut = {"truncation": self._longest is not None, "max_length": self._longest}
        if self._reply_only:
            return self._not_empty(self._tokenizer(reply, **cut))
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template([m.as_dict() for m in conversation], tokenize=False)
            return self._tokenizer(text, add_special_tokens=False, **cut)
        prompt = "\n".join(message.content for message in conversation[:-1])
        return self._tokenizer(prompt, reply, **cut)

    def _not_empty(self, encoded: Any) -> Any:
        """A reply without any token as its end alone, since no model reads nothing."""
        if encoded["input_ids"]:
            return encoded
        known = (self._tokenizer.eos_token_id, self._tokenizer.bos_token_id, self._tokenizer.pad_token_id, 0)
        end = next(token for token in known if token is not None)
        return {name: [{"input_ids": end, "attention_mask": 1}.get(name, 0)] for name in encoded}

    def _agree_on_padding(self) -> bool:
        """Whether conversations can be padded to one length: model and tokenizer have to name the same token."""
        config = self._model.config
        if self._tokenizer.pad_token_id is None and config.pad_token_id is not None:
            self._tokenizer.pad_token = self._tokenizer.convert_ids_to_tokens(config.pad_token_id)
        elif config.pad_token_id is None:
            config.pad_token_id = self._tokenizer.pad_token_id
        return self._tokenizer.pad_token_id is not None
