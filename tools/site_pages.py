"""The site's pages that are made from code and results, as hooks of MkDocs (`mkdocs.yml`); the check of links.

`make docs` runs it. It needs no torch: options of commands, public names and figures are read from files.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ROOT / "src" / "tightfit"
NOTE = re.compile(r"\]\((?:\.\./)?src/tightfit/([\w/]+)/README\.md\)")  # a link from docs/ to a room's note
SITES_OWN = ("404.html",)
ASSETS = ("iframe-worker.js", "site.css")  # files beside this one
LONG_CODE = re.compile(r"<code>([^<>]{28,})</code>")
UNSEARCHED = 40_000  # bytes of a page from which on it is tables of figures, which nobody searches for
CARD_SIZES = (6, 8, 10, 12, 16, 24, 48, 80, 141)  # gigabytes that cards are sold with
NEAR = 0.12  # the share of those gigabytes by which a card's own memory may differ
EXAMPLE = re.compile(r"\[dim\](.*?)\[/\]", re.DOTALL)
MARKUP = re.compile(r"\[/?(?:bold|dim|italic)?\]")
PYTHON = {
    "Predict and plan": (
        "estimate",
        "plan",
        "curve",
        "maximise",
        "fit",
        "verify",
        "trace",
        "build_dry",
        "TokenBatch",
        "Step",
    ),
    "What they return": ("Estimate", "Plan", "Curve", "Largest", "Recipes", "Verification", "Traced"),
    "Levers by hand": ("recompute", "capture", "offload", "stream", "tile", "compile_blocks", "undo", "set_allocator"),
    "Train, score, make smaller": ("train", "score", "score_choices", "distil", "prune", "quantise"),
    "Their results": ("TrainResult", "TextScore", "ChoiceScores", "DistilResult", "CompressionReport"),
    "Watch, diagnose, run": ("monitor", "diagnose", "run", "card", "Diagnosis", "CardRun"),
}


# Pages


def pages() -> dict[str, str]:
    """Every page that is not in docs/, by its place on the site."""
    return {
        "index.md": from_the_root(ROOT / "README.md", "docs/"),
        "zh/index.md": from_the_root(ROOT / "README.zh-CN.md", "docs/", up="../"),
        "changelog.md": from_the_root(ROOT / "CHANGELOG.md", "docs/"),
        "contributing.md": from_the_root(ROOT / "CONTRIBUTING.md", "docs/"),
        "reference/command_line.md": command_line_page(),
        "reference/python.md": python_page(),
        "reference/kept_by.md": kept_by_page(),
        "cards/index.md": cards_page(),
        **{f"design/{name}.md": text for name, text in design_notes().items()},
        **{f"cards/{size}gb.md": card_page(size) for size in CARD_SIZES},
    }


def from_the_root(path: Path, docs: str, up: str = "") -> str:
    """A page of the repository's root, with its links as from the site's root. Notes are not on the site."""
    text = re.sub(r"\[notes\]\(notes/[^)]*\)", "`notes/`", path.read_text("utf-8"))
    return re.sub(rf"\]\({docs}", f"]({up}", text)


ELSEWHERE = {  # pages of the repository's root, and where they are on the site
    "README.md": "index.md",
    "README.zh-CN.md": "zh/index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)*)([^)#:\s]+)(#[^)\s]*)?\)")


def with_links_of_the_site(markdown: str, uri: str) -> str:
    """Links to the root's pages lead to the site's. Links to other files of the repository become their names."""
    here = Path("docs") / uri if uri not in ELSEWHERE.values() else Path("docs") / Path(uri).name
    depth = "../" * uri.count("/")
    markdown = NOTE.sub(lambda found: f"]({depth}design/{found[1].replace('/', '.')}.md)", markdown)

    def replaced(found: re.Match[str]) -> str:
        text, up, target, anchor = found[1], found[2], found[3], found[4] or ""
        if target in ELSEWHERE:
            return f"[{text}]({depth}{ELSEWHERE[target]}{anchor})"
        place = Path(*_resolved((here.parent / up / target).parts))
        outside = place.parts[0] != "docs" or (up and uri in ELSEWHERE.values() and not (ROOT / place).exists())
        return f"`{place}`" if outside and not (ROOT / "docs" / target).exists() else found[0]

    return LINK.sub(replaced, markdown)


def _resolved(parts: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for part in parts:
        if part == "..":
            found.pop()
        else:
            found.append(part)
    return found


def command_line_page() -> str:
    """Every command with its options, from the program itself."""
    import typer

    from tightfit.cli.app import app

    root: Any = typer.main.get_command(app)
    lines = ["# Command line", "", *_described(root.help), ""]
    for name, command in root.commands.items():
        lines += _command(f"tightfit {name}", command)
    return re.sub(r"```\n+```sh\n", "", "\n".join(lines)) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    yield from (f"## {name}", "", *_described(command.help), "")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if arguments or options:
        yield from (f"| {'argument or option' if arguments else 'option'} | meaning |", "|---|---|")
        for each in (*arguments, *options):
            yield f"| {_called(each)} | {_cell(each.help or '')} |"
        yield ""
    for part, below in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {part}", below)


def _called(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _described(text: str | None) -> Iterator[str]:
    """A help text: its examples as blocks of code."""
    for paragraph in re.split(r"\n\s*\n", (text or "").strip()):
        if examples := EXAMPLE.findall(paragraph):
            yield from ("", "```sh", *(" ".join(example.split()) for example in examples), "```", "")
        else:
            yield from ("", " ".join(_cell(paragraph).split()))


def _cell(text: str) -> str:
    return MARKUP.sub("", " ".join(text.split())).replace("|", "\\|").replace("<", "&lt;")


def python_page() -> str:
    """The public names by what they are for, each from its docstring."""
    lines = ["# Python", "", "The names of `import tightfit`."]
    for title, names in PYTHON.items():
        lines += ["", f"## {title}", *(f"\n::: tightfit.{name}" for name in names)]
    return "\n".join(lines) + "\n"


def design_notes() -> dict[str, str]:
    """The note of each room and of its parts, by the name that the table of the house has."""
    notes = sorted(ROOMS.rglob("README.md"), key=lambda path: path.parts)
    return {
        ".".join(note.relative_to(ROOMS).parent.parts): re.sub(r"\]\((?:\.\./)+docs/", "](../", note.read_text("utf-8"))
        for note in notes
    }


def kept_by_page() -> str:
    """Which test keeps which promise."""
    sys.path.insert(0, str(ROOT / "tools"))
    from kept_by import kept, promises, table

    return f"# Which test keeps which promise\n\n{table(promises(), kept())}"


# Recipes by card


def what_fits() -> tuple[ModuleType, list[dict[str, Any]]]:
    """The benchmark that asked, and its answers. (It imports no torch before it is run.)"""
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("environment", _without_torch())
    try:
        spec = importlib.util.spec_from_file_location("what_fits_page", folder / "what_fits.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module, json.loads((folder / "results" / "what_fits.json").read_text("utf-8"))["results"]


def _without_torch() -> ModuleType:
    module: Any = ModuleType("environment")
    module.ROOT, module.environment = ROOT, dict
    return module


def cards_of(size: int) -> list[tuple[str, str]]:
    """The keys and names of the known cards that are sold with so many gigabytes."""
    from tightfit.devices.known import known_devices

    found = known_devices()
    nearest = {
        key: min(CARD_SIZES, key=lambda one, held=device.spec.memory_bytes / 2**30: abs(one - held))
        for key, device in found.items()
    }
    return [
        (key, device.spec.name)
        for key, device in found.items()
        if nearest[key] == size and abs(device.spec.memory_bytes / 2**30 - size) <= NEAR * size
    ]


def card_page(size: int) -> str:
    """What fits a card of so many gigabytes."""
    module, results = what_fits()
    lines = [f"# {size} GB", ""]
    cards = cards_of(size)
    lines += ["Cards: " + ", ".join(f"{name} (`{key}`)" for key, name in cards) + ".", ""]
    lines += [
        "Every row is a dry run of the real step; nothing was computed on a card. Seconds follow published rates: "
        "[how true](../accuracy.md). Ask for your own model:",
        "",
        f"```sh\ntightfit fit --model qwen2.5-1.5b --device {cards[0][0]} --seq-len 2048\n```",
    ]
    for row in results:
        if row["gigabytes"] == size:
            lines.append(module.section(row))
    return "\n".join(lines) + "\n"


def cards_page() -> str:
    """The sizes, and what is not a card of the list."""
    _, results = what_fits()
    lines = ["# Recipes by card", "", "| memory | cards | largest model shown |", "|---|---|---|"]
    for size in CARD_SIZES:
        fitting = [r["model"] for r in results if r["gigabytes"] == size and any(x["fits"] for x in r["recipes"])]
        names = ", ".join(name for _, name in cards_of(size))
        lines.append(f"| [{size} GB]({size}gb.md) | {names} | {fitting[-1] if fitting else ''} |")
    return "\n".join(lines) + OTHER_DEVICES


OTHER_DEVICES = """

## Cards of other sizes

`--device rtx3080,memory=20GiB` is a card with other memory. [Models and cards by name](../names.md) lists all that are
known.

## Apple

There is no prediction for Apple's GPUs: PyTorch runs other kernels there (MPS), and no rule for their scratch memory
was derived. On a Mac, tightfit plans and trains on the CPU.

## CPU

Every command works without `--device`: the budget is then of the process's memory, seconds come from a calibration of
your machine (about fifteen seconds, once), and predicted peaks are those of the allocator ([accuracy](../accuracy.md)).

```sh
tightfit plan --model cpu26 --batch-size 4 --seq-len 256 --budget 0.65x
```

## AMD, Intel, TPU

Not known: an estimate would be a guess, and tightfit does not guess.
"""


# Hooks of MkDocs


def on_config(config: Any) -> Any:
    sys.path.insert(0, str(ROOT / "src"))
    for entry in config.nav:
        for title, target in entry.items():
            if title == "How it works":
                target.extend({name: f"design/{name}.md"} for name in design_notes())
            if target == "cards/":
                entry[title] = ["cards/index.md", *({f"{size} GB": f"cards/{size}gb.md"} for size in CARD_SIZES)]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    assets = {f"assets/{name}": (ROOT / "tools" / name).read_text("utf-8") for name in ASSETS}
    for uri, content in (pages() | assets).items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if len(markdown) > UNSEARCHED and page.file.src_uri != "reference/command_line.md":
        page.meta["search"] = {"exclude": True}
    return with_links_of_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Long names of code in tables may break after the marks within them. A browser would break words, or none."""
    return re.sub(r"<td.*?</td>", lambda cell: LONG_CODE.sub(_breakable, cell[0]), html, flags=re.DOTALL)


def _breakable(code: re.Match[str]) -> str:
    return "<code>" + re.sub(r"(::|[/_.,=?])(?=\w)", r"\1<wbr>", code[1]) + "</code>"


def on_page_context(context: Any, page: Any, config: Any, **_: Any) -> Any:
    """The theme's own words, and the language that a page says it is in."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith("zh/") else "en"
    return context


def on_post_build(config: Any) -> None:
    if dead := dead_links(Path(config.site_dir)):
        raise SystemExit("dead links:\n" + "\n".join(dead))


# Links


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names.update(filter(None, (found.get("id"), found.get("name"))))
        self.links += [link for key in ("href", "src") if (link := found.get(key))]


def parsed(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text("utf-8"))
    return page


def dead_links(site: Path) -> list[str]:
    """Each local link of the site that leads nowhere, with its page."""
    found = {path.resolve(): parsed(path) for path in sorted(site.rglob("*.html")) if path.name not in SITES_OWN}
    dead = []
    for path, page in found.items():
        for link in dict.fromkeys(page.links):
            target, _, name = link.partition("#")
            if re.match(r"[a-z]+:|//", link):
                continue
            to = (path.parent / unquote(target)).resolve() if target else path
            named = to not in found or not name or unquote(name) in found[to].names or name.startswith("__")
            if not to.exists() or not named:
                dead.append(f"{path.relative_to(site.resolve())}: {link}")
    return dead
