"""Takes screenshots of the built site, and finds pages that are wider than a phone.

    mkdocs build --strict && python scripts/screenshots.py --out shots [PAGE...]

opens each page of `site/` (all of them, or those named, such as `losses/`) in headless Chromium: in
windows of 1440 x 900 and 390 x 844 px, light and dark. It writes `PAGE-WIDTH-SCHEME.png`, prints
the pages whose content is wider than the window, with the widest elements, and exits with 1 if
there are any. Without `--out` it takes no screenshots. It needs Chromium, and tornado, which
Jupyter brings.
"""

import argparse
import asyncio
import base64
import functools
import http.server
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

from tornado.websocket import WebSocketClientConnection, websocket_connect

SITE = Path(__file__).resolve().parents[1] / "site"
SIZES = ((1440, 900), (390, 844))
SCHEMES = ("light", "dark")
CHROMIUM = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0"),
)
LIMIT_S = 60
# The width of the page, and the elements wider than the window without a box that scrolls it.
MEASURE = """
(() => {
  const wide = [];
  const scrolls = (x) => x && x !== document.body &&
    (/auto|scroll|hidden/.test(getComputedStyle(x).overflowX) || scrolls(x.parentElement));
  for (const x of document.querySelectorAll(".md-content *"))
    if (x.getBoundingClientRect().right > innerWidth + 1 && !scrolls(x.parentElement) &&
        !scrolls(x)) wide.push(x.tagName.toLowerCase() + ": " + x.textContent.trim().slice(0, 60));
  return [document.documentElement.scrollWidth, innerWidth, wide.slice(0, 3)];
})()
"""


class Browser:
    """A page of Chromium, by its DevTools protocol."""

    def __init__(self, connection: WebSocketClientConnection):
        self._connection = connection
        self._numbers = itertools.count(1)

    async def call(self, method: str, **params: object) -> dict:
        """The result of a command."""
        number = next(self._numbers)
        text = json.dumps({"id": number, "method": method, "params": params})
        await self._connection.write_message(text)
        return (await self._next(lambda x: x.get("id") == number))["result"]

    async def open(self, address: str) -> None:
        """Returns when the page and its images are there."""
        await self.call("Page.navigate", url=address)
        await self._next(lambda x: x.get("method") == "Page.loadEventFired")

    async def evaluate(self, expression: str):
        """The value of an expression of JavaScript."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"]["value"]

    async def _next(self, is_it) -> dict:
        async with asyncio.timeout(LIMIT_S):
            while True:
                text = await self._connection.read_message()
                if text is None:
                    raise ConnectionError("Chromium has ended")
                if is_it(message := json.loads(text)):
                    return message


async def look_at(address: str, port: int, pages: list[str], out: Path | None) -> list[str]:
    """Opens the pages in all sizes and schemes; returns the pages that are too wide."""
    new = urllib.request.Request(f"http://127.0.0.1:{port}/json/new", method="PUT")
    with urllib.request.urlopen(new) as answer:
        target = json.load(answer)["webSocketDebuggerUrl"]
    browser = Browser(await websocket_connect(target, max_message_size=1 << 28))
    await browser.call("Page.enable")
    problems = []
    for (width, height), scheme in itertools.product(SIZES, SCHEMES if out else SCHEMES[:1]):
        await browser.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        preference = [{"name": "prefers-color-scheme", "value": scheme}]
        await browser.call("Emulation.setEmulatedMedia", features=preference)
        for page in pages:
            await browser.open(f"{address}/{page}")
            is_wide, window, elements = await browser.evaluate(MEASURE)
            if scheme == SCHEMES[0] and is_wide > window:
                where = "; ".join(elements) or "outside of the content"
                problems.append(f"{page or 'index'}: {is_wide} px in a window of {window}: {where}")
            if out:
                shot = await browser.call("Page.captureScreenshot")
                name = page.strip("/").replace("/", "_") or "index"
                file = out / f"{name}-{width}-{scheme}.png"
                file.write_bytes(base64.b64decode(shot["data"]))
    return problems


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site without a word."""

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


def wait_for_port(folder: Path, process: subprocess.Popen) -> int:
    """The port of Chromium's DevTools, which it writes to a file."""
    file = folder / "DevToolsActivePort"
    for _ in range(10 * LIMIT_S):
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        if process.poll() is not None:
            break
        threading.Event().wait(0.1)
    sys.exit("Chromium did not start.")


def pages_of(site: Path) -> list[str]:
    """All pages of a site; pages that only lead to another page are left out."""
    pages = sorted(site.rglob("index.html"))
    return [
        f"{folder}/".removeprefix("./")
        for x in pages
        if 'http-equiv="refresh"' not in x.read_text()
        for folder in [x.parent.relative_to(site).as_posix()]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="such as losses/; default: all")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write screenshots to it")
    options = parser.parse_args()
    if not (SITE / "index.html").exists():
        sys.exit("There is no site/: run mkdocs build --strict first.")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    handler = functools.partial(Handler, directory=str(SITE))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [*CHROMIUM, f"--user-data-dir={folder}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = wait_for_port(Path(folder), process)
            pages = options.pages or pages_of(SITE)
            problems = asyncio.run(look_at(address, port, pages, options.out))
        finally:
            process.terminate()
            process.wait(LIMIT_S)
    print("\n".join(problems) or f"{len(pages)} pages fit their windows.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
