"""`tightfit mcp`, asked by the protocol's own client."""

import asyncio
import json
import sys

import mcp
import pytest

from tightfit.cli.assistants import server

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 300,
}  # fmt: skip
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.06 GiB is free. Of the allocated memory 21.90 GiB is allocated by PyTorch, and 200.00 MiB "
    "is reserved by PyTorch but unallocated."
)


def ask(tool, of=None, **arguments):
    """The answer of a tool: whether it is an error, and its text."""

    async def asked():
        async with mcp.Client(of or server()) as client:
            found = await client.call_tool(tool, arguments)
            return found.is_error, "\n".join(part.text for part in found.content)

    return asyncio.run(asked())


def tools(of):
    async def listed():
        async with mcp.Client(of) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    return asyncio.run(listed())


def test_the_tools_only_read_and_running_a_script_is_asked_for():
    found = tools(server())
    assert found.keys() == {"fit", "estimate", "plan", "doctor"}
    assert all(tool.annotations.read_only_hint for tool in found.values())
    assert found["fit"].input_schema["required"] == ["model", "device"]
    assert tools(server(allow_run=True)).keys() == {*found, "run"}


@pytest.mark.slow  # an estimate of an 8B twice
def test_an_estimate_of_a_configs_text_is_that_of_the_command():
    wrong, text = ask("estimate", model=json.dumps(CONFIG), device="rtx3060-12", seq_len=32, precision="fp32")
    assert not wrong, text
    assert "peak" in text
    assert "RTX 3060 12GB" in text


@pytest.mark.slow  # 11 s: a process that plans; the test above starts one too
def test_a_plan_that_does_not_fit_is_an_answer():
    wrong, text = ask("plan", model="cpu8", device="rtx3060-12", budget="1MiB", seq_len=32)
    assert not wrong, text
    assert "cannot fit: the least is" in text


@pytest.mark.slow  # a command of its own
def test_a_log_is_read():
    wrong, text = ask("doctor", log=LOG)
    assert not wrong, text
    assert "2.00 GiB were requested" in text


@pytest.mark.parametrize("model", ["/etc/passwd", "models_by_name:decoder", "../run", "somebody/model", "--help"])
def test_a_path_a_module_and_a_repository_are_refused(model):
    wrong, text = ask("estimate", model=model, device="rtx4090")
    assert wrong
    assert "is no published name" in text


def test_a_file_of_adapters_is_refused(tmp_path):
    (tmp_path / "adapter.json").write_text('{"r": 4}')
    wrong, text = ask("estimate", model="cpu8", device="rtx4090", adapter=str(tmp_path / "adapter.json"))
    assert wrong
    assert text.endswith("an adapter is no file here: pass its keys, such as r=16,alpha=32")


def test_sizes_and_times_are_limited():
    wrong, text = ask("estimate", model="cpu8", device="rtx4090", seq_len=2**21)
    assert wrong
    assert "tokens are more than" in text
    wrong, text = ask("fit", of=server(seconds=1), model="llama-3.1-8b", device="rtx3060-12")
    assert wrong
    assert "no answer within 1 s" in text
    wrong, text = ask("doctor", log="x" * 2**21)
    assert wrong
    assert "more than 1,048,576 bytes" in text


@pytest.mark.slow  # two interpreters, one behind the other
def test_the_command_speaks_the_protocol_over_stdin_and_stdout():
    command = mcp.StdioServerParameters(command=sys.executable, args=["-m", "tightfit", "mcp"])
    wrong, text = ask("doctor", of=command, log=LOG)
    assert not wrong, text
    assert "2.00 GiB were requested" in text


def test_a_script_that_ends_before_a_card_is_asked_for_is_said_to():
    wrong, text = ask("run", of=server(allow_run=True), script="raise SystemExit(0)", device="rtx-nothing")
    assert wrong
    assert "rtx-nothing" in text


def test_an_optimizer_is_a_name_and_no_code_to_import():
    wrong, text = ask("estimate", model="cpu8", device="rtx3060-12", seq_len=32, optimizer="torch.optim:RAdam")
    assert wrong
    assert "is not known here" in text
