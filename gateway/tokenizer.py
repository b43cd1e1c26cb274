"""Text into token ids and back, for one model.

The `tokenizers` library splits text; the bytes behind each token come from the
vocabulary itself, so that streamed and whole text can never differ. transformers
would do the first part too, but it imports torch.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Splitter

from gateway import detokenizer, vocabulary
from gateway.chat import ChatTemplate, Message
from gateway.errors import InvalidField, ModelFilesInvalid

ROLES = ("system", "user", "assistant")


class Tokenizer:
    """A model's tokenizer and chat template. Immutable; safe to use from several threads.

    The names of special tokens, such as <|im_end|>, are parsed in plain prompts:
    who writes a whole prompt may write those too. In the content of chat messages
    they are ordinary text, so that no message can pretend to be another role's.
    """

    def __init__(self, directory: Path) -> None:
        self.file = directory / "tokenizer.json"
        self._splitter = _load_splitter(self.file)
        self._vocabulary = vocabulary.Vocabulary(self._splitter, _load_json(self.file))
        settings = _load_json(directory / "tokenizer_config.json", default={})
        self._template = _load_template(directory, settings)
        self._special_texts = self._vocabulary.special_texts
        self.vocab_size: int = self._splitter.get_vocab_size(with_added_tokens=True)
        # Characters that one token can stand for, at most.
        self.longest_token = max(map(len, self._splitter.get_vocab(with_added_tokens=True)))
        self.eos_ids = frozenset(self._find_eos(directory, settings))

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, where present, its companions.

        Raises:
            ModelFilesInvalid: a file is missing, broken, or of a kind we cannot decode.
        """
        return cls(directory)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model's tokenizer adds of itself.

        Takes time in proportion to the text and releases the GIL: call it in a
        thread for long texts. Raises InvalidField("prompt") on lone surrogates.
        """
        return self._split(self._splitter, text, "prompt", add_special_tokens=True)

    def encode_continuation(self, text: str) -> list[int]:
        """The same for text that is not the start of a prompt: nothing is added to it."""
        return self._split(self._splitter, text, "prompt", add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """What to show a token as: its bytes, or the name of a special one."""
        return self._vocabulary.shown_bytes_of(token_id)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the tokens; special tokens have none."""
        return detokenizer.decode(self._vocabulary, token_ids)

    def detokenizer(self) -> detokenizer.Detokenizer:
        return detokenizer.Detokenizer(self._vocabulary)

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Raises:
            InvalidField: no messages, an unknown role, text that the template refuses,
                or a model without a chat template.
        """
        if self._template is None:
            message = "the model has no chat template"
            raise InvalidField("messages", message, reason="UNSUPPORTED_OPTION")
        if not messages:
            raise InvalidField("messages", "messages must not be empty")
        for index, one in enumerate(messages):
            if one["role"] not in ROLES:
                field = f"messages[{index}].role"
                raise InvalidField(field, f"{field}: must be one of {', '.join(ROLES)}")
        marked, hidden = self._hide_special_texts(messages)
        text = self._template.render(marked, add_generation_prompt=add_generation_prompt)
        return self._split_around(text, hidden)

    def _hide_special_texts(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """Messages with each special token's name replaced by a marker, and the names.

        The marker is random, so no message can contain it. Nothing is replaced in
        the usual case, whose tokens are then those of the whole text at once.
        """
        marker = f"<{secrets.token_hex(8)}>"
        hidden: list[str] = []
        marked: list[Message] = []
        for message in messages:
            content = message["content"]
            for name in self._special_texts:
                if name in content:
                    content = content.replace(name, f"{marker}{len(hidden)}{marker}")
                    hidden.append(name)
            marked.append({**message, "content": content})
        return marked, [marker, *hidden] if hidden else []

    def _split_around(self, text: str, hidden: list[str]) -> list[int]:
        """Token ids of a rendered text; hidden names become ordinary tokens."""
        if not hidden:
            return self._split(self._splitter, text, "messages", add_special_tokens=False)
        marker, *names = hidden
        token_ids: list[int] = []
        for index, part in enumerate(text.split(marker)):
            is_name = index % 2 == 1
            splitter = self._plain_splitter if is_name else self._splitter
            piece = names[int(part)] if is_name else part
            token_ids += self._split(splitter, piece, "messages", add_special_tokens=False)
        return token_ids

    @functools.cached_property
    def _plain_splitter(self) -> Any:
        """A second tokenizer, for which special tokens' names are ordinary text."""
        splitter = _load_splitter(self.file)
        splitter.encode_special_tokens = True
        return splitter

    @staticmethod
    def _split(splitter: Any, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidField(field, f"{field}: text has a lone surrogate") from None
        # A batch of one: unlike `encode`, this releases the GIL.
        [encoding] = splitter.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _find_eos(self, directory: Path, settings: dict[str, Any]) -> set[int]:
        """All tokens that end an answer; models spread them over three files."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _load_json(directory / name, default={}).get("eos_token_id")
            found |= {value} if isinstance(value, int) else set(value or ())
        named = self._splitter.token_to_id(_content(settings.get("eos_token")))
        return found | ({named} if named is not None else set())


def _load_splitter(path: Path) -> Any:
    try:
        return Splitter.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelFilesInvalid(f"{path}: {error}") from None


def _load_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    if default is not None and not path.exists():
        return default
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesInvalid(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelFilesInvalid(f"{path}: not a JSON object")
    return value


def _load_template(directory: Path, settings: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = settings.get("chat_template")
    if path.exists():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named ones
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    names = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    return ChatTemplate(source, {key: value for key, value in names.items() if value})


def _content(token: Any) -> str:
    """A special token's text; files have it plain or wrapped."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
