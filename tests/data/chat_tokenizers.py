"""Tokenizers with chat templates in the manner of those that people use, made here."""

from pathlib import Path

from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tightfit.training.data.chat_template import ChatTemplate
from tightfit.training.data.chats import ChatEncoder
from tightfit.training.data.tokenizer import TextTokenizer, train_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role }}{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n' + (call.function or call) | tojson }}"
    "{{- '\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MINIMIND = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}"
    "{{- message.content or '' }}{%- for call in message.tool_calls or [] %}{{- '\n' + call | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- elif not (message.role == 'system' and loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}"
)
# As Qwen 3's: what was thought is left out of all turns but the last one.
FORGETFUL = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and loop.last %}"
    "{%- set content = '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' + content %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
PLAIN = (
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"
)
LINES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>"]
TEXTS = [
    "user assistant system\n\n The cat sat on the mat.\n\n\nHello there, how are you?  Well: 12345. <think></think>",
    "user\nassistant\n\n\n  spaces   and\n\nlines äöü 漢字 🙂🙂",
] * 20


def made(template: str, *, lines: bool = False) -> tuple[ChatEncoder, PreTrainedTokenizerFast, TextTokenizer]:
    """Our encoder, the same tokenizer in transformers, and ours; with `lines` it splits at lines as Llama 3's does."""
    ours = train_tokenizer(TEXTS, 400)
    raw = ours._tokenizer
    if lines:
        split = pre_tokenizers.Split(Regex(LINES), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.add_special_tokens(SPECIAL)
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw, **tokens)
    theirs.chat_template = template
    return ChatEncoder(raw, ChatTemplate(template, tokens, "chat_template.jinja")), theirs, ours


def saved(folder: Path, template: str) -> Path:
    """A folder with such a tokenizer, as transformers saves it."""
    made(template)[1].save_pretrained(folder)
    return folder
