"""A chat template and what it is told beside the messages; text in, text out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpu_grpo.environments.actions import Message
from tpu_grpo.records.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """A ChatTemplate writes conversations by the template of a tokenizer.

    Raises:
        ConfigError: for a tokenizer without one.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", tools: Sequence[Mapping[str, Any]], switches: Mapping[str, Any]
    ):
        self._tokenizer = tokenizer
        self.tools: list[Any] = [dict(tool) for tool in tools]
        self._switches = dict(switches)
        if not tokenizer.chat_template:
            raise ConfigError(
                "environment.name needs a tokenizer with a chat template, this one has none; use the instruction-tuned "
                "model's tokenizer"
            )
        self.source = tokenizer.get_chat_template(tools=self.tools or None)

    def shows_tools(self, messages: Sequence[Message]) -> bool:
        """Say whether a conversation is another with the tools than without."""
        try:
            return self.write(messages) != self.write(messages, with_tools=False)
        except ConfigError:  # a template for tools alone may refuse to write without
            return True

    def write(self, messages: Sequence[Message], *, is_open: bool = True, with_tools: bool = True) -> str:
        """Return the text of a conversation.

        Args:
            messages: the conversation; if the last one is the assistant's and it is open, it goes on there.
            is_open: whether the policy's turn begins at the end.
            with_tools: whether the template is told of the tools.

        Raises:
            ConfigError: if the template refuses it.
        """
        from jinja2 import TemplateError  # what chat templates are written in; transformers imports it lazily too

        goes_on = is_open and messages[-1]["role"] == "assistant"
        try:
            written: Any = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=(self.tools or None) if with_tools else None,
                tokenize=False,
                add_generation_prompt=is_open and not goes_on,
                continue_final_message=goes_on,
                **self._switches,
            )
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(
                f"the tokenizer's chat template must accept the roles {roles}, which a conversation has, it says: "
                f"{error}; take a model whose template does"
            ) from error
        return str(written)
