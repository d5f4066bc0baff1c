"""The site is whole and asks nobody for anything: `docs/hooks/site_check.py` ends its build if not.

CI builds it (`mkdocs build --strict`); these tests check that broken sites fail.
"""

import tarfile

import pytest

from places import ROOT
from policy.test_reference import hook

SITE = hook("site_check")


@pytest.fixture
def make_site(tmp_path):
    def make(**pages: str):
        for name, text in {"index": "", **pages}.items():
            folder = tmp_path / "site" / ("" if name == "index" else name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "index.html").write_text(f'<h1 id="top">x</h1>{text}')
        (tmp_path / "site" / "site.css").write_text("p { background: url(image.png) }")
        (tmp_path / "site" / "image.png").write_bytes(b"")
        return tmp_path / "site"

    return make


@pytest.mark.parametrize(
    "text",
    [
        '<a href="../">up</a><a href="../#top">up</a><a href="#top">here</a><a href=".">here</a>',
        '<a href="../image.png">file</a><img alt="x" src="../image.png"><img alt="x" src="data:,">',
        '<a href="https://docs.jax.dev/#there">people ask for it</a><a href="mailto:a@b.c">a</a>',
        '<link rel="canonical" href="https://a.b"><link rel="stylesheet" href="../site.css">',
        '<a name="old"></a><a href="#old">an old anchor</a><a href="/guide/#top">from the top</a>',
        '<h2 id="a b"></h2><a href="#a%20b">quoted</a>',
    ],
)
def test_a_site_that_is_whole_has_no_problems(make_site, text):
    assert SITE.problems(make_site(guide=text)) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="../gone/">x</a>', "leads to ../gone/, and there is no gone/index.html."),
        ('<a href="../gone.png">x</a>', "leads to ../gone.png, and there is no gone.png."),
        ('<img alt="x" src="gone.png">', "leads to gone.png, and there is no guide/gone.png."),
        ('<a href="../#gone">x</a>', "leads to ../#gone, and index.html has no anchor gone."),
        ('<a href="#gone">x</a>', "leads to #gone, and guide/index.html has no anchor gone."),
        ('<script src="https://a.b/c.js">', "asks another host for https://a.b/c.js."),
        ('<script src="//a.b/c.js">', "asks another host for //a.b/c.js."),
        ('<img alt="x" srcset="https://a.b/c.png 2x">', "asks another host for https://a.b/c.png."),
        ('<link rel="stylesheet" href="https://a.b/c">', "asks another host for https://a.b/c."),
        ('<p style="background: url(http://a.b/c)">', "asks another host for http://a.b/c."),
        ("<style>@import 'https://a.b/c';</style>", "asks another host for https://a.b/c."),
        ('<img src="../image.png">', "shows ../image.png without alternative text."),
        (
            '<pre class="mermaid">',
            'has an element for which the theme asks another host: class="mermaid".',
        ),
    ],
)
def test_a_missing_file_or_a_request_to_another_host_is_a_problem(make_site, text, problem):
    assert SITE.problems(make_site(guide=text)) == [f"guide/index.html {problem}"]


def test_styles_are_read_too(make_site):
    folder = make_site()
    (folder / "site.css").write_text("@font-face { src: url('https://a.b/font.woff') }")
    assert SITE.problems(folder) == ["site.css asks another host for https://a.b/font.woff."]


def test_a_site_that_is_not_whole_ends_the_build_and_makes_no_archive(make_site):
    exceptions = pytest.importorskip("mkdocs.exceptions")
    folder = make_site(guide='<a href="#gone">x</a>')
    config = {"site_dir": str(folder), "config_file_path": str(folder.parent / "mkdocs.yml")}
    with pytest.raises(exceptions.PluginError, match="The site is not whole:\nguide/index.html"):
        SITE.on_post_build(config)
    assert not (folder.parent / "site.tar.gz").exists()


def test_the_archive_has_the_site_and_is_the_same_each_time(make_site, tmp_path):
    folder, archive = make_site(guide="y"), tmp_path / "site.tar.gz"
    SITE.write_archive(folder, archive)
    first = archive.read_bytes()
    (folder / "guide" / "index.html").touch()
    SITE.write_archive(folder, archive)
    names = ["site/guide/index.html", "site/image.png", "site/index.html", "site/site.css"]
    with tarfile.open(archive) as tar:
        assert tar.getnames() == names
    assert archive.read_bytes() == first


def test_ci_checks_the_site_and_leaves_the_archive_that_the_docs_name():
    assert "  - docs/hooks/site_check.py\n" in (ROOT / "mkdocs.yml").read_text()
    assert "mkdocs build --strict\n" in (ROOT / ".ci" / "run").read_text()
    assert f"`{SITE.ARCHIVE}`" in (ROOT / "docs" / "development.md").read_text()
    assert f"/{SITE.ARCHIVE}\n" in (ROOT / ".gitignore").read_text()
