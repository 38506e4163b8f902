"""``make check-report``: the page in headless Chromium, on a phone's width and a wide screen.

It fails on an error in the console, on a request that leaves the page, and on content wider than the window. The page
is measured by a copy of it that carries a small script; Chromium's ``--dump-dom`` hands the result back, so that no
browser driver has to be installed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sonar_repro.errors import UserError

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (390, 1600)
PRINT_WIDTH = 1047  # 277 mm at 96 px an inch: A4 landscape within its margins
HEIGHT = 900
TIMEOUT_S = 120
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--no-first-run",
)
FLAGS += ("--disable-extensions", "--disable-background-networking", "--enable-logging=stderr", "--v=0")
CONSOLE = re.compile(r":CONSOLE[^\]]*\] (.*)")  # the page has no script of its own: any line is a fault

# The new headless mode has a least window width of 500 px, so the page is laid out in a frame of the asked width.
PROBE = """<!doctype html><meta charset="utf-8"><title>probe</title><body style="margin:0">
<iframe id="f" style="border:0;width:{width}px;height:{height}px"></iframe><pre id="result"></pre><script>
const f = document.getElementById("f");
f.onload = () => setTimeout(() => {{
  const d = f.contentDocument, w = f.contentWindow, wide = [], edge = w.innerWidth + 1;
  const right = e => e.getBoundingClientRect().right;
  const all = selector => [...d.querySelectorAll(selector)];
  for (const e of all("body *")) {{
    if (e.closest(".scroll, .make") || e.closest("details:not([open])")) continue;
    if (right(e) > edge) wide.push(e.tagName + "." + e.className + " " + Math.round(right(e)));
  }}
  const size = e => parseFloat(w.getComputedStyle(e).fontSize);
  const loaded = w.performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"));
  document.getElementById("result").textContent = JSON.stringify({{
    scroll: d.documentElement.scrollWidth, inner: w.innerWidth, height: d.documentElement.scrollHeight,
    wide: wide.slice(0, 5), requests: loaded.slice(0, 5),
    broken: [...d.images].filter(i => i.complete && !i.naturalWidth).length,
    boxes: all(".scroll, .make").filter(e => right(e) > edge).length,
    small: all("p, td, th, li").filter(e => e.textContent.trim() && size(e) < 11).length}});
}}, 300);
f.srcdoc = {page};
</script>"""
FRAME = '<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:{height}px" src="{page}">'


@dataclass
class Result:
    """What one width showed: faults (empty if all is well), the page's height, and where its picture is."""

    width: int
    faults: list[str]
    height: int
    picture: Path | None


def chromium() -> str:
    """Path of a Chromium on this machine. Raises UserError if there is none."""
    found = next((path for name in BINARIES if (path := shutil.which(name))), None)
    if found is None:
        raise UserError(f"check-report: no {BINARIES[0]} on this machine; install one (apt-get install chromium)")
    return found


def _run(arguments: list[str], profile: Path) -> subprocess.CompletedProcess:
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"check-report: Chromium did not finish within {TIMEOUT_S} s; is the machine busy? try again"
        ) from error


def _probe(page: Path, width: int, folder: Path) -> dict | None:
    text = json.dumps(page.read_text(encoding="utf-8")).replace("</", "<\\/")
    probe = folder / f"probe{width}.html"
    probe.write_text(PROBE.format(width=width, height=HEIGHT, page=text), encoding="utf-8")
    done = _run(
        ["--virtual-time-budget=8000", f"--window-size={max(width, 500)},{HEIGHT}", "--dump-dom", probe.as_uri()],
        folder,
    )
    found = re.search(r'<pre id="result">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    if not found:
        return None
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def look(page: Path, width: int, out: Path) -> Result:
    """Measure the page at one width, watch the console, and take a picture of its whole length."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seen = _probe(page, width, folder)
        if seen is None:
            return Result(width, ["the page could not be measured"], 0, None)
        faults = []
        if seen["scroll"] > seen["inner"] + 1:
            faults.append(
                f"content is {seen['scroll']} px wide in a window of {seen['inner']} px: {'; '.join(seen['wide'])}"
            )
        for key, said in (
            ("broken", "images do not show"),
            ("boxes", "scroll boxes are too wide"),
            ("small", "texts are under 11 px"),
        ):
            if seen[key]:
                faults.append(f"{seen[key]} {said}")
        if seen["requests"]:
            faults.append(f"it asks for {', '.join(seen['requests'])}")
        picture = out / f"report_{width}.png"
        shown = folder / f"frame{width}.html"
        frame = FRAME.format(width=width, height=seen["height"], page=page.resolve().as_uri())
        shown.write_text(frame, encoding="utf-8")
        height = min(seen["height"], 16000)
        size = f"--window-size={max(width, 500)},{height}"
        done = _run(["--virtual-time-budget=8000", size, f"--screenshot={picture.resolve()}", shown.as_uri()], folder)
        console = CONSOLE.findall(done.stderr)
        faults += [f"console: {line.strip()}" for line in console]
        return Result(width, faults, seen["height"], picture if picture.exists() else None)


def print_faults(page: Path) -> list[str]:
    """Tables that a sheet of paper would cut off: the page laid out with its print rules, as wide as A4 landscape."""
    with tempfile.TemporaryDirectory() as name:
        printed = Path(name) / "print.html"
        text = page.read_text(encoding="utf-8").replace("@media print", "@media all").replace('class="scroll"', "")
        printed.write_text(text, encoding="utf-8")
        seen = _probe(printed, PRINT_WIDTH, Path(name))
    return ["the page could not be measured"] if seen is None else [f"cut off: {wide}" for wide in seen["wide"]]


def check(page: Path, out: Path) -> int:
    """Look at both widths and at the print; prints one line each. Exit code 1 on a fault. Raises UserError without a
    page or a browser."""
    if not page.is_file():
        raise UserError(f"check-report: {page} is not there; make it first (python -m analysis report)")
    chromium()
    faulty = False
    if wide := print_faults(page):
        print(f"print: {'; '.join(wide)}")
        faulty = True
    for width in WIDTHS:
        result = look(page, width, out)
        faulty = faulty or bool(result.faults)
        state = (
            "; ".join(result.faults)
            if result.faults
            else f"no console error, nothing too wide, {result.height} px long"
        )
        print(f"{width} px: {state}" + (f" ({result.picture})" if result.picture else ""))
    return 1 if faulty else 0


def main() -> int:
    """Check the report of ``--out``; exit code 2 for a mistake, said in one line."""
    parser = argparse.ArgumentParser(description="Open the report in headless Chromium at two widths and as a print.")
    parser.add_argument("--out", type=Path, default=Path("analysis/output"), help="folder of report.html")
    out = parser.parse_args().out
    try:
        return check(out / "report.html", out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
