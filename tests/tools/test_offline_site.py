from pathlib import Path

from tools.offline_site import foreign_addresses

_PAGE = """<html><head><link rel="stylesheet" href="//fonts.example/a.css"><link rel="canonical" href="https://x.example">
<link rel="stylesheet" href="assets/own.css"></head><body><a href="https://elsewhere.example">a link is not loaded</a>
<script src="https://scripts.example/b.js"></script><img src="pictures/mesh.svg"></body></html>"""


def test_what_a_page_loads_from_other_hosts_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(_PAGE)
    (tmp_path / "own.css").write_text("@import 'own2.css'; a { background: url(https://pictures.example/c.png) }")
    assert list(foreign_addresses(tmp_path)) == [
        "index.html: //fonts.example/a.css",
        "index.html: https://scripts.example/b.js",
        "own.css: https://pictures.example/c.png",
    ]


def test_links_to_other_hosts_are_fine(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://elsewhere.example">x</a><script src="a.js"></script>')
    assert list(foreign_addresses(tmp_path)) == []
