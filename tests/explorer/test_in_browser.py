"""The page in headless Chromium: asked, filled by an upload, narrow and wide, light and dark, and ended by Ctrl-C."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

QUIET = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
TINY = "model: {hidden_size: 32, num_layers: 2, num_heads: 2, vocab_size: 64}\ndata: {sequence_length: 32}\n"
SHOTS = os.environ.get("TIGHTFIT_SCREENSHOTS")  # a folder that keeps what the browser showed
# It starts the command (7 s of imports in three processes) and a browser, and needs Gradio, playwright and Chromium.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of playwright
    pytest.mark.skipif(find_spec("gradio") is None, reason="gradio is not installed"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="playwright is not installed"),
]


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium is installed")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server():
    """The command in a process of its own, whose first line is the address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", "explore", "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C goes to a whole group
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), process.stderr.read()
    yield process, address
    if process.poll() is None:
        process.kill()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide", "narrow"])
def tab(request, chromium):
    width, scheme = request.param
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.set_default_timeout(240_000)
    tab.hosts, tab.troubles, tab.width = set(), [], width
    tab.on("request", lambda asked: tab.hosts.add(asked.url.split("/")[2]) if asked.url.startswith("http") else None)
    tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
    tab.on("console", lambda said: tab.troubles.append(said.text) if said.type == "error" else None)
    yield tab
    context.close()


def shot(tab, name):
    if SHOTS:
        tab.wait_for_timeout(600)
        tab.screenshot(path=f"{SHOTS}/{name}-{tab.width}.png", full_page=True)


def test_the_page_answers_in_a_browser(server, tab, tmp_path):
    _, address = server
    tab.goto(address)
    tab.wait_for_selector("#answer .bars")  # the default question is asked at once
    upload = tmp_path / "tiny.yaml"
    upload.write_text(TINY)
    tab.locator("#upload input[type=file], input[type=file]").first.set_input_files(upload)
    tab.wait_for_selector("#notes >> text=Asking about tiny.yaml")
    assert tab.locator("#field-sequence_length input").input_value() == "32"
    tab.wait_for_selector("#answer >> text=Fits RTX 4090 as it is")
    assert tab.locator("#timeline svg").count() >= 1
    shot(tab, "timeline")
    for name, place in (("Trade-off", "#curve table"), ("Run it", "#yaml .cm-content")):
        choose(tab, name)
        tab.wait_for_selector(place)
        shot(tab, name.lower().replace(" ", "-"))
    assert "hidden_size: 32" in tab.locator("#yaml .cm-content").inner_text()
    widths = tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]
    assert {host.partition(":")[0] for host in tab.hosts} == {"127.0.0.1"}
    assert tab.troubles == []


def await_hidden(tab):
    """Wait until the answer is hidden, and another line stands in its place. Styles may take a moment to change."""
    tab.wait_for_function(
        "() => { const answer = document.querySelector('#answer');"
        " return getComputedStyle(answer.querySelector('.verdict')).visibility === 'hidden'"
        " && getComputedStyle(answer, '::before').content.includes('Changed: press Predict') }"
    )


@pytest.mark.keeps("verdict-page-bar-say")
def test_the_verdict_is_on_the_first_screen_and_goes_when_a_field_is_changed(server, tab):
    tab.goto(server[1])
    tab.wait_for_selector("#answer >> text=/Fits|Does not fit/")
    assert tab.locator("#answer .verdict").first.bounding_box()["y"] < 900
    shot(tab, "first")
    card = tab.locator("#field-device input")
    card.click()
    card.press("Control+a")
    card.press_sequentially("rtx3060")
    tab.wait_for_function(
        "() => { const all = [...document.querySelectorAll('#field-device ul li')].map(each => each.innerText);"
        " return all.length > 1 && all.every(text => text.includes('rtx3060')) }"
    )
    shot(tab, "card")
    card.press("Enter")
    await_hidden(tab)
    tab.wait_for_timeout(2500)  # of which an answer that is under way sends something each second
    await_hidden(tab)
    shot(tab, "changed")
    for number in ("0", "-5", "1.5", "100000"):
        tab.locator("#field-batch_size input").fill(number)
        await_hidden(tab)
        tab.locator("#ask").click()
        tab.wait_for_selector("#answer [role=alert]")
        assert "Fits" not in tab.locator("#answer").inner_text()
    shot(tab, "number")
    assert tab.troubles == []


def test_what_does_not_fit_has_nothing_to_run(server, tab):
    tab.goto(server[1])
    tab.locator("#field-budget textarea, #field-budget input").first.fill("1GiB")
    tab.locator("#ask").click()
    tab.wait_for_selector("#answer >> text=Does not fit")
    shot(tab, "refused")
    choose(tab, "Run it")
    tab.wait_for_selector("#yaml >> text=Nothing to run")
    shot(tab, "nothing-to-run")


def test_a_mistake_is_one_line_on_the_page(server, tab, tmp_path):
    tab.goto(server[1])
    tab.wait_for_selector("#answer .bars")
    budget = tab.locator("#field-budget textarea, #field-budget input").first
    budget.fill("plenty")  # at once, as a paste does: no key is pressed
    await_hidden(tab)
    tab.locator("#ask").click()
    tab.wait_for_selector("#answer [role=alert]")
    tab.wait_for_timeout(2500)  # nothing of the question before comes after it
    line = tab.locator("#answer [role=alert] p").inner_text()
    assert "'plenty' is not an amount of memory" in line
    shot(tab, "mistake")
    evil = tmp_path / "evil.yaml"
    evil.write_text("model: {path: /etc}")
    tab.locator("input[type=file]").first.set_input_files(evil)
    tab.wait_for_selector("#notes >> text=it reads no folders and no hub")


def choose(tab, name):
    """Open a tab of the page, which a narrow screen puts into a menu."""
    tab.wait_for_timeout(300)
    direct = tab.get_by_role("tab", name=name)
    if not direct.count() or not direct.first.is_visible():
        tab.locator(".overflow-menu > button").first.click()
        tab.locator(".overflow-dropdown button", has_text=name).first.click()
    else:
        direct.first.click()


def has_processes(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_the_command_and_its_workers(server):
    process, _ = server
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    # The system may need a moment to take away a worker whose parent has ended.
    ends = time.monotonic() + 10
    while has_processes(process.pid) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not has_processes(process.pid)
