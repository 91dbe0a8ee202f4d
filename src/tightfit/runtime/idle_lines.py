"""The lines of other packages that nobody asked for."""

import logging

# Loggers of other packages, and how a message begins or goes on that says nothing to whoever runs a command: torchao
# cannot load extensions for cards that are not here, and uses a name that PyTorch will drop; bitsandbytes could not get
# a faster kernel from a hub; transformers has no loss by the name None, which GPT-2's config has by default.
IDLE = {
    "torchao": "Failed to load ",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    "transformers.modeling_utils": "`loss_type=None` was set in the config",
}


def leave_out_idle_lines() -> None:
    """Drop the messages of `IDLE` and no others."""
    for name, text in IDLE.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(text))


class _Without(logging.Filter):
    """Lets everything through but messages with a text in them."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()
