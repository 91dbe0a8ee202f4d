"""The files at the root that other programs read: forms, hooks, the image, the Space, how to cite."""

import inspect
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

from tightfit.cli.explorer import serving

ROOT = Path(__file__).resolve().parent.parent.parent
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def read(name):
    return (ROOT / name).read_text("utf-8")


def extras():
    return set(tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"])


@pytest.mark.parametrize("name", ["wrong.yml", "measured.yml"])
def test_who_reports_is_asked_for_the_report_of_doctor(name):
    fields = {field["id"]: field for field in yaml.safe_load((FORMS / name).read_text("utf-8"))["body"]}
    assert fields["report"]["attributes"]["label"] == "tightfit doctor --report"
    assert fields["report"]["validations"] == {"required": True}


def test_every_form_has_what_github_wants():
    forms = [path for path in FORMS.glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text("utf-8"))
        assert {"name", "description", "body"} <= form.keys()
        assert len({field["id"] for field in form["body"]}) == len(form["body"])
    assert "- [" in read(".github/pull_request_template.md")


def test_the_hooks_before_a_commit_are_the_checks_of_the_makefile():
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    check = re.search(r"^check:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)[1]
    tools = [re.search(r"\$\(BIN\)/(.*)", line)[1].removesuffix(" .") for line in check.splitlines()]
    assert {hook["entry"].removeprefix(".venv/bin/").partition(" --force")[0] for hook in hooks} == {
        tool.removesuffix(" --check") for tool in tools
    }


def test_the_image_copies_files_that_exist_and_installs_extras_that_exist():
    text = read("Dockerfile")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert sources
        for source in sources:
            assert (ROOT / source).exists(), source
    assert set(re.search(r"/src\[([\w,]+)\]", text)[1].split(",")) <= extras()


def test_the_space_serves_the_page_on_the_address_that_it_is_given(monkeypatch):
    served, takes = [], inspect.signature(serving.serve)
    monkeypatch.setattr(serving, "serve", lambda *args, **how: served.append(takes.bind(*args, **how).args))
    monkeypatch.setenv("GRADIO_SERVER_NAME", "127.0.0.1")
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7861")
    runpy.run_path(str(ROOT / "examples" / "space" / "app.py"), run_name="__main__")
    ((name, port, *_),) = served
    assert (name, port) == ("127.0.0.1", 7861)
    assert set(re.findall(r"tightfit\[(\w+)\]", read("examples/space/requirements.txt"))) == {"explore"} <= extras()
    told = yaml.safe_load(read("examples/space/README.md").split("---")[1])
    assert (told["sdk"], told["app_file"]) == ("gradio", "app.py")


def test_who_cites_and_who_reports_a_hole_finds_how():
    cited = yaml.safe_load(read("CITATION.cff"))
    assert {"cff-version", "title", "message", "authors", "license"} <= cited.keys()
    assert "in private" in read("SECURITY.md")
    assert "SECURITY.md" in read("CODE_OF_CONDUCT.md")
    assert re.search(r"^## 0\.2\.0", read("CHANGELOG.md"), re.MULTILINE)
