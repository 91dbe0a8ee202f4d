"""`tightfit doctor --report`: what an issue needs to know, and nobody's folders."""

from pathlib import Path

import pytest
import torch

import tightfit as package
from command_line import tightfit
from tightfit.recipes.doctor.bug_report import without_folders

PLAN = Path(__file__).resolve().parent.parent / "records" / "plan.json"
LOG = """Traceback (most recent call last):
  File "/home/ada/a secret project/train.py", line 88, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 1.06 GiB is free. Of the allocated memory 21.90 GiB is allocated by PyTorch, and 200.00 MiB is reserved by \
PyTorch but unallocated.
"""


def test_a_report_says_versions_and_machine():
    out = tightfit("doctor", "--report").out
    assert f"| tightfit | {package.__version__} |" in out
    assert f"| torch | {torch.__version__} |" in out
    assert "| CPU | " in out
    assert "### Plan" not in out


def test_a_report_of_a_plan_says_its_levers_and_bytes():
    plan = package.Plan.from_json(PLAN)
    out = tightfit("doctor", "--report", PLAN).out
    assert "| levers | recompute |" in out
    assert f"| device | {plan.device} |" in out
    assert "### What the file says" in out


def test_a_report_of_a_log_names_no_folder(tmp_path, monkeypatch):
    log = tmp_path / "train.log"
    log.write_text(LOG)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "/home/ada/conf")
    out = tightfit("doctor", "--report", log).out
    assert "2.00 GiB were requested" in out
    assert "| PYTORCH_CUDA_ALLOC_CONF | …/conf |" in out
    for private in ("ada", "secret", str(tmp_path)):
        assert private not in out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("in /home/ada/work/train.py, line 3", "in …/train.py, line 3"),
        (r"in C:\Users\Ada\train.py", "in …/train.py"),
        ('File "/home/ada/my work/train.py", line 3', 'File "…/train.py", line 3'),
        ("~/models/llama", "…/llama"),
        ("7 tokens/s, 2/3 of 5 GB/s", "7 tokens/s, 2/3 of 5 GB/s"),
        ("https://docs.pytorch.org/memory_viz", "https://docs.pytorch.org/memory_viz"),
    ],
)
def test_folders_go_and_the_rest_stays(text, shown):
    assert without_folders(text) == shown


def test_without_a_file_a_diagnosis_is_refused_and_a_report_takes_no_model():
    assert "give a FILE" in tightfit("doctor").error
    assert "--report asks about no model" in tightfit("doctor", "--report", "--model", "cpu8").error
