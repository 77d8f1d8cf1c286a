"""Messages to token ids and back, through the model's own tokenizer and chat template.

Text is tokenised here, once, when a prompt is made; from then on token ids go in and token ids come
out. `decode` is for people and for rewards, never for building the next request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.data.rows import DataError

Messages = Sequence[Mapping[str, str]]


class ChatTemplate:
    """The tokenizer of one Hugging Face model folder; holds no state beyond it."""

    def __init__(self, model_dir: Path) -> None:
        """Load ``tokenizer.json`` and the chat template.

        Raises:
            DataError: the folder has no fast tokenizer, or the tokenizer no chat template.
        """
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import logging

        if not (model_dir / "tokenizer.json").is_file():
            raise DataError(f"{model_dir}: no tokenizer.json; model.path must be a Hugging Face model folder")
        logging.set_verbosity_error()  # it warns that the folder names a subclass; the file is the same
        self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_dir)
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{model_dir}: the tokenizer has no chat template; use an instruction-tuned model"
            )
        self.stop_token_ids = _stop_token_ids(model_dir, self._tokenizer.eos_token_id)

    def render(self, messages: Messages) -> str:
        """The text of a conversation up to and including the opening of the model's turn."""
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
        )
        return text

    def encode(self, messages: Messages) -> tuple[int, ...]:
        """Token ids of `render`'s text; the template writes the special tokens itself."""
        ids: list[int] = self._tokenizer(self.render(messages), add_special_tokens=False)["input_ids"]
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of ``token_ids``; special tokens such as the end of the turn are left out by default."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)
        return text


def _stop_token_ids(model_dir: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """The ids that end a turn: the generation config's, and the tokenizer's own."""
    stops = set() if eos_token_id is None else {eos_token_id}
    file = model_dir / "generation_config.json"
    if file.is_file():
        declared = json.loads(file.read_text()).get("eos_token_id")
        if declared is not None:
            stops |= {declared} if isinstance(declared, int) else set(declared)
    return tuple(sorted(stops))
