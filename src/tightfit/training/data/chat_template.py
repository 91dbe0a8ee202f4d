"""Chat templates: Jinja programs in a tokenizer's files that write a conversation as one text.

`template_sandbox` runs them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tightfit.training.data.bad_lines import BadLine

# ChatML (OpenAI, 2023), with a mark around what the assistant says. For tokenizers that are trained here.
TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools:\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{%- generation %}"
    "{%- if message.reasoning_content %}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
    "{%- endif %}{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- (message.content or '') + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans [begin, end) of its characters that `{% generation %}` marks."""

    text: str
    generated: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template. `tokens` are the special tokens by the names that templates know: `bos_token`, `eos_token`.

    `source` is the file that errors name.
    """

    text: str
    tokens: Mapping[str, str]
    source: str

    @property
    def marks_answers(self) -> bool:
        """True if it has `{% generation %}` around what the assistant says."""
        return _GENERATION.search(self.text) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """A conversation as text, with the beginning of the assistant's next turn behind it if asked for. `variables`
        are names of the template's own, such as `enable_thinking`.

        Raises `BadLine` where the template refuses the conversation, `DataError` where it is no template.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        template = self._template
        try:
            with template.environment.tracking(blocks, spans):  # pyright: ignore[reportAttributeAccessIssue]
                for block in template.generate(
                    messages=[dict(message) for message in messages],
                    tools=None if tools is None else list(tools),
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.tokens, **(variables or {})},
                ):
                    blocks.append(block)
        # A template is a program: on a conversation that it is not made for it may raise anything.
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadLine(f"the chat template ({self.source}) refuses the conversation: {said}") from None
        return Rendered("".join(blocks), tuple(spans))

    @cached_property
    def _template(self) -> Any:
        from tightfit.training.data.template_sandbox import compile_template  # Jinja is read where a template is

        return compile_template(self.text, self.source)
