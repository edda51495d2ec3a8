from pathlib import Path

from tokenloom.services.engine.records.identity import location_of, supervisor_of


def test_a_store_is_known_by_its_place(tmp_path: Path) -> None:
    boot = tmp_path / "boot"
    boot.write_text("one")
    folder = tmp_path / "kv"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    known = location_of(folder.as_uri(), boot)
    assert location_of((tmp_path / "link").as_uri(), boot) == known
    folder.rmdir()
    folder.mkdir()
    assert location_of(folder.as_uri(), boot) == known, "engines make a folder again that was removed"
    assert location_of((tmp_path / "other").as_uri(), boot) != known
    boot.write_text("another host")
    assert location_of(folder.as_uri(), boot) != known
    assert location_of("lm://10.0.0.7:65432", boot) == location_of("lm://10.0.0.7:65432/", tmp_path / "none")
    assert location_of("lm://10.0.0.7:65432") != location_of("lm://10.0.0.8:65432")


def test_supervisors_of_one_host_name_and_path_differ_by_directory_and_boot(tmp_path: Path) -> None:
    first, boot = tmp_path / "first" / "engine-0.json", tmp_path / "boot"
    second = tmp_path / "second" / "engine-0.json"
    for path in (first, second):
        path.parent.mkdir()
    boot.write_text("one")
    assert supervisor_of(first, boot) == supervisor_of(first, boot)
    seen = {supervisor_of(first, boot)}
    boot.write_text("another host with this name")
    seen.add(supervisor_of(first, boot))
    # What a second container has at the same path.
    first.parent.rename(tmp_path / "elsewhere")
    second.parent.rename(first.parent)
    seen.add(supervisor_of(first, boot))
    assert len(seen) == 3
    assert supervisor_of(first, tmp_path / "none").endswith("engine-0.json")
